"""An optimizer of the program's own that makes a rate of a split weight's shape is told."""

import math
import warnings

import pytest
import torch
from torch import nn

from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear
from tests.states import state

RATES = {
    "size": lambda p: max(1, p.size(0) / p.size(-1)) ** 0.5,
    "shape of the gradient": lambda p: math.sqrt(16 / p.grad.shape[-1]),
    "numel": lambda p: 1 / p.numel() ** 0.5,
    "fan in": lambda p: 1 / nn.init._calculate_fan_in_and_fan_out(p)[0] ** 0.5 if p.dim() > 1 else 1.0,
    "none": lambda p: 1.0,
    "a view": lambda p: p.view(p.shape[0], -1).view(-1, p.shape[-1]).new_ones(()).item(),
    "a new state": lambda p: torch.zeros(p.shape).add(1.0).flatten()[0].item(),
}


class Signs(torch.optim.Optimizer):
    def __init__(self, parameters, rate):
        super().__init__(parameters, {"lr": 0.01})
        self.rate = rate

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-group["lr"] * self.rate(p))


def told(name):
    place = Placement.of(state(tp=2))
    module = nn.Sequential(ColumnParallelLinear(8, 32, place=place), nn.Tanh(), RowParallelLinear(32, 8, place=place))
    optimizer = Signs(module.parameters(), RATES[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            module(x.to(module[0].weight.dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if str(w.message).startswith("Signs takes")]


@pytest.mark.parametrize("name", RATES)
def test_rates_by_the_shape_of_a_part(ranks, name):
    for messages in ranks(told, name, world=2):
        assert len(messages) == (name not in ("none", "a view", "a new state"))
        assert all("takes a rate by the shape of a matrix" in message for message in messages)
