"""Fingerprints of what all tensor ranks must have alike: the rank that differs is named, not the next one."""

import pytest
import torch
from torch import nn

from core.tensor_parallel import ColumnParallelLinear, Placement, VocabParallelEmbedding, watch
from tests.states import state


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


class Decoder(nn.Module):
    """Generates by a method of its own, which no hook of a forward sees."""

    def __init__(self, place):
        super().__init__()
        self.table = VocabParallelEmbedding(32, 8, place=place)
        self.head = ColumnParallelLinear(8, 32, bias=False, place=place, gather_output=True)

    def forward(self, ids):
        return self.decode(ids)

    def decode(self, ids):
        return self.head(torch.tanh(self.table(ids)))


def sampled(seeds_alike):
    place = Placement.of(state(tp=2))
    torch.manual_seed(0)
    model = Decoder(place)
    torch.manual_seed(1 if seeds_alike else 1 + place.rank)
    ids = torch.arange(4).view(4, 1)
    model(ids)
    for _ in range(6):
        with torch.no_grad():
            logits = model.decode(ids)[-1]
        ids = torch.cat((ids, torch.multinomial(logits.softmax(-1), 1)))
    return ids.flatten().tolist()


def refused_sampling():
    with pytest.raises(ValueError, match=r"other ids \[\d, 1\] on rank 1 than on rank 0.*with one seed on all"):
        sampled(False)


def test_tokens_that_are_sampled_with_a_seed_per_rank(ranks):
    first, second = ranks(sampled, True, world=2)
    assert first == second
    ranks(refused_sampling, world=2)
