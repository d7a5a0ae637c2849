"""Fingerprints of what all tensor ranks must have alike: the rank that differs is named, not the next one."""

import pytest
import torch

from core.tensor_parallel import watch


@pytest.mark.parametrize(
    ("rows", "unlike"),
    [
        ([[1.0, 2.0], [1.0, 2.0], [1.0, 2.5]], 2),
        ([[1.0, 2.0], [1.0, 1.5], [1.0, 2.5]], 1),
        ([[1.0, 2.0], [1.0, 2.001], [1.0, 2.0]], None),
        ([[torch.nan, 2.0], [1.0, 2.0], [1.0, 2.0]], None),
    ],
)
def test_the_rank_that_differs(monkeypatch, rows, unlike):
    monkeypatch.setattr(watch, "all_gather", lambda numbers, group: torch.tensor(rows))
    assert watch._unlike_rank(torch.zeros(2), None, 0.01) == unlike
