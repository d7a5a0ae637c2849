"""Parts of a weight that are alike on all tensor ranks: by right where nothing varies along the split dim."""

import warnings

import pytest
import torch
from torch import nn

from core.parallel_state.layout import Layout, set_layout
from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear
from tests.states import state

INITIAL = {
    "a constant": lambda: torch.ones(4, 3),
    "the same for each channel": lambda: torch.arange(1.0, 4.0).log().expand(4, 3),  # Mamba's A_log
    "drawn alike": lambda: torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
}


class Mixer(nn.Module):
    def __init__(self, place, initial):
        super().__init__()
        self.up, self.down = ColumnParallelLinear(6, 8, place=place), RowParallelLinear(8, 6, place=place)
        self.scales = nn.Parameter(INITIAL[initial]().double().clone())
        set_layout(self.scales, Layout((8, 3), {"tp": 0}))

    def forward(self, x):
        return self.down(self.up(x) * self.scales.sum(1))


def told(initial):
    torch.manual_seed(0)
    module = Mixer(Placement.of(state(tp=2)), initial)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            module(torch.ones(2, 6).double()).sum().backward()
    return [str(w.message) for w in caught if "scales is the same on the tensor ranks" in str(w.message)]


def diverged():
    """A run whose weights are no numbers any more."""
    module = Mixer(Placement.of(state(tp=2)), next(iter(INITIAL)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            module(torch.ones(2, 6).double()).sum().backward()


def test_a_run_that_has_diverged(ranks):
    ranks(diverged, world=2)


@pytest.mark.parametrize("initial", INITIAL)
def test_parts_that_are_alike(ranks, initial):
    for messages in ranks(told, initial, world=2):
        assert len(messages) == (initial == "drawn alike")
