"""A forward that gives something else when it runs again for its backward is told, once; others are not."""

import warnings

import pytest
import torch
from torch import nn

from core.autograd import recompute
from core.autograd.recomputation.first_outputs import SameOutputs, magnitudes
from core.pipeline import Pipeline
from tests.pipeline.tiny import rows, squares
from tests.states import state

OUTSIDE = torch.ones((), dtype=torch.float64)


class Part(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change, self.calls = change, 0
        self.linear = nn.Linear(6, 6).double()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x):
        return self.linear(self.change(self, x))


def asks_grad_mode(module, x):
    return 2 * x if torch.is_grad_enabled() else x


def asks_input(module, x):
    return 2 * x if x.requires_grad else x


def writes_outside(module, x):
    OUTSIDE.mul_(1.1)
    return x * OUTSIDE


def counts(module, x):
    module.calls += 1
    return x * module.calls


def averages(module, x):
    module.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - module.mean


def draws(module, x):
    return x * torch.rand(6, dtype=torch.float64)


def told(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "gave other outputs when it ran again" in str(w.message)]


def stage_steps(change):
    stages = {0: Part(lambda module, x: x), 1: Part(change), 2: Part(lambda module, x: x)}
    pipe = Pipeline(stages, ps=state(), schedule="looped-bfs", num_microbatches=4, recompute="stage")
    for step in range(2):
        pipe.step(rows(8, seed=step), squares)


def region_calls(change):
    part = Part(change)
    for call in range(4):
        x = rows(3, seed=call).requires_grad_()
        torch.tanh(recompute(part, torch.tanh(x))).sum().backward()


@pytest.mark.parametrize("change", [asks_grad_mode, asks_input, writes_outside])
def test_another_forward_is_told_once(change):
    messages = told(lambda: stage_steps(change))
    assert len(messages) == 1
    assert messages[0].startswith("stage 1 gave")
    messages = told(lambda: region_calls(change))
    # a region's arguments want gradients as before
    assert len(messages) == (change is not asks_input)
    assert all(message.startswith("Part gave") for message in messages)


@pytest.mark.parametrize("change", [counts, averages, draws])
def test_what_is_put_back_is_not_told(change):
    assert told(lambda: stage_steps(change)) == told(lambda: region_calls(change)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64])
def test_rounding_is_not_told(dtype):
    x = torch.randn(64, 64, dtype=dtype)
    compared = SameOutputs()
    first = magnitudes({"x": [x, 3, torch.arange(3)]})
    assert told(lambda: compared.compare(first, magnitudes((x.flip(0),)), "it")) == []
    for _ in range(2):
        assert len(told(lambda: compared.compare(first, magnitudes([1.02 * x]), "it"))) == 1
        compared = SameOutputs()
