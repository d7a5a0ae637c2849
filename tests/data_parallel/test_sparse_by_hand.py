"""Optimizers of a program's own that take sparse gradients apart, where DataParallel makes all gradients dense."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from tests.states import state


class RowWise(torch.optim.Optimizer):
    """Rows that a sparse gradient has decay, as in recommenders' tables."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            rows, values = torch.arange(len(p)), p.grad
            if p.grad.is_sparse:
                gradient = p.grad.coalesce()
                rows, values = gradient._indices()[0], gradient._values()
            p[rows] -= 0.1 * (values + 0.1 * p[rows])


def said_of(make, sparse):
    model = nn.Embedding(8, 6, sparse=sparse)
    DataParallel(model, state(), zero_stage=1)
    optimizer = make(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if "under DataParallel all are dense" in str(w.message)]


@pytest.mark.parametrize(
    "make, sparse, times",
    [(RowWise, True, 1), (RowWise, False, 0), (torch.optim.Adagrad, True, 0)],
)
def test_who_asks_for_them_is_told_once(ranks, make, sparse, times):
    assert [len(messages) for messages in ranks(said_of, make, sparse, world=2)] == [times, times]
