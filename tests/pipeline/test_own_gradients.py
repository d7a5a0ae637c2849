"""Auxiliary losses whose gradient an autograd function of a program's own makes, under executors."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from core.pipeline import Pipeline, SingleStage
from tests.states import state


class AddAuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(())


class Scaled(torch.autograd.Function):
    """Nothing but a layer."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient, (gradient * ctx.saved_tensors[0]).sum()


class Part(nn.Module):
    def __init__(self, kind, first):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(()))
        self.kind, self.first = kind, first

    def forward(self, input):
        y = self.linear(input).tanh()
        auxiliary = 0.1 * y.softmax(-1).mean(0).pow(2).sum()
        if self.kind == "layer":
            return Scaled.apply(y, self.scale)
        if not self.first:
            return y
        return AddAuxiliaryLoss.apply(y, auxiliary * len(input) if self.kind == "times" else auxiliary)


def of_sums(output, microbatch):
    return F.mse_loss(output, microbatch["target"], reduction="sum"), len(output)


def of_means(output, microbatch):
    return F.mse_loss(output, microbatch["target"]), 1


def said_of(kind, loss_fn, pp):
    torch.manual_seed(3)
    ps = state(pp=pp)
    batch = {"input": torch.randn(8, 6), "target": torch.randn(8, 6)}
    if pp > 1:
        module = Part(kind, ps.index("pp") == 0)
        executor = Pipeline({ps.index("pp"): module}, ps=ps, num_microbatches=4, schedule="1f1b")
    else:
        module = Part(kind, True)
        executor = SingleStage(module, ps=ps, num_microbatches=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            executor.step(batch, loss_fn)
    return [str(w.message) for w in caught if "as an auxiliary loss" in str(w.message)]


@pytest.mark.parametrize("pp", [1, 2])
def test_a_gradient_of_one_beside_sums_is_told_once(ranks, pp):
    first, *_ = ranks(said_of, "plain", of_sums, pp, world=2)
    assert len(first) == 1 and "AddAuxiliaryLoss.backward gives a number the gradient 1" in first[0]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kind, loss_fn", [("times", of_sums), ("plain", of_means), ("layer", of_sums)])
def test_right_ones_hear_nothing(ranks, kind, loss_fn, pp):
    assert ranks(said_of, kind, loss_fn, pp, world=2) == [[], []]
