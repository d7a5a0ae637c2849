"""Sizes that a program reads before the first forward, and several forwards with batch norms before one backward."""

import copy
import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.parallel_state.collectives import all_reduce
from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear, VocabParallelEmbedding
from tests.states import state


def told_of_numel():
    ps = state(tp=2)
    place = Placement.of(ps)
    module = nn.Sequential(ColumnParallelLinear(8, 16, place=place), nn.Tanh(), RowParallelLinear(16, 8, place=place))
    DataParallel(module, ps)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert sum(p.numel() for p in module.parameters()) > 0
    return [str(w.message) for w in found]


def test_sizes_of_parts_are_told_behind_data_parallel(ranks):
    for messages in ranks(told_of_numel, world=2):
        assert len(messages) == 1 and "numel by hand sees" in messages[0] and "this rank's part of" in messages[0]


def gradients_of_two_forwards(zero_stage):
    ps = state()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()
    alone = copy.deepcopy(module)
    DataParallel(module, ps, zero_stage=zero_stage)
    generator = torch.Generator().manual_seed(1 + ps.rank)
    for _ in range(2):
        a, b = torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
        for model in (module, alone):
            model.zero_grad()
            (model(a) - model(b)).square().mean().backward()
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            mean = all_reduce(q.grad.clone(), ps.group("dp-cp")) / ps.size("dp-cp")
            torch.testing.assert_close(p.grad, mean, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_two_forwards_with_batch_norms_before_a_backward(ranks, zero_stage):
    """A batch norm in training reads no running statistics: those of the second forward may be sent before."""
    ranks(gradients_of_two_forwards, zero_stage, world=2)


def told_of_rows_in_a_hook(zero_stage):
    """Rows of a split weight's gradient are frozen by number, in a hook."""
    ps = state(tp=2)
    model = nn.Sequential(VocabParallelEmbedding(64, 8, place=Placement.of(ps)), nn.Linear(8, 8))

    def hook(gradient):
        gradient = gradient.clone()
        gradient[:5] = 0
        return gradient

    model[0].weight.register_hook(hook)
    shard = DataParallel(model, ps, zero_stage=zero_stage)
    with warnings.catch_warnings(record=True, action="always") as found:
        for _ in range(2):
            model(torch.arange(64).view(8, 8)).square().mean().backward()
            model.zero_grad()
    shard.remove()
    return [str(w.message) for w in found if "by hand" in str(w.message)]


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_rows_by_number_in_a_hook_are_told_at_every_stage(ranks, zero_stage):
    for messages in ranks(told_of_rows_in_a_hook, zero_stage, world=4):
        assert len(messages) == 1 and "rows and columns by number are this rank's" in messages[0], messages
