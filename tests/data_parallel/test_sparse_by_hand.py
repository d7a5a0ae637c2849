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


@pytest.mark.parametrize(
    "make, sparse, is_told",
    [(RowWise, True, True), (RowWise, False, False), (torch.optim.Adagrad, True, False)],
)
def test_who_asks_for_them_is_told_once(make, sparse, is_told):
    model = nn.Embedding(8, 6, sparse=sparse)
    DataParallel(model, state(), zero_stage=1)
    optimizer = make(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [w for w in caught if "under DataParallel all are dense" in str(w.message)]
    assert len(found) == is_told
