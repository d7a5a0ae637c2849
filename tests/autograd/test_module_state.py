"""A forward that runs twice counts its batch once in running statistics; outputs and gradients are the plain ones."""

import copy

import pytest
import torch
from torch import nn

from core.autograd import apply_recompute, recompute
from core.parallel_state import ParallelState
from core.pipeline import Pipeline
from core.pipeline.schedule import schedules
from core.pipeline.schedule.passes import add_recompute


def model():
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]
    return nn.Sequential(*parts).double()


def plain(batches):
    twin = model()
    for x in batches:
        twin(x).square().sum().backward()
    return twin


def same(found, want):
    for (name, a), (_, b) in zip(found.state_dict().items(), want.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")
    for a, b in zip(found.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert want[0][1].num_batches_tracked == 3


def batches():
    return torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).unbind()


@pytest.mark.parametrize("how", ["policy", "function"])
def test_in_a_region(how):
    found = model()
    if how == "policy":
        apply_recompute(found, ["0", "1"])
    for x in batches():
        y = found(x) if how == "policy" else recompute(found, x)
        y.square().sum().backward()
    same(found, plain(batches()))
    assert found[0][1].track_running_stats


def test_in_a_stage_that_r_runs_again():
    found = model()
    again = add_recompute(schedules.make("gpipe", 1, 3))
    assert len(again.recomputed) == 3
    pipeline = Pipeline(found, ps=ParallelState.single("cpu"), schedule=again, num_microbatches=3)
    pipeline.step(torch.cat(batches()), lambda y, _: (y.square().sum(), 1.0))
    same(found, plain(batches()))


def test_a_norm_in_eval_mode_keeps_using_its_statistics():
    found, x = model(), batches()[0]
    found(x)
    found.eval()
    twin = copy.deepcopy(found)
    torch.testing.assert_close(recompute(found, x), twin(x))
    recompute(found, x).square().sum().backward()
    twin(x).square().sum().backward()
    for a, b in zip(found.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
