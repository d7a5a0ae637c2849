"""What a row linear returns, used with a rank's own columns, is told where its gradient is not summed."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear, copy_to_tensor_region
from tests.states import state


class Gated(nn.Module):
    """A gate that all ranks hold alike scales each rank's columns."""

    def __init__(self, place, habit):
        super().__init__()
        self.up = ColumnParallelLinear(6, 8, place=place)
        self.gate = RowParallelLinear(8, 1, bias=False, place=place)
        self.down = RowParallelLinear(8, 6, place=place)
        self.group, self.rank, self.habit = place.group, place.rank, habit

    def forward(self, x):
        y = torch.tanh(self.up(x))
        gate = torch.sigmoid(self.gate(y))
        if self.habit == "copied":
            gate = copy_to_tensor_region(gate, self.group)
        if self.habit == "one rank":
            return self.down(y * gate if self.rank else y)
        return self.down(y * gate) if self.habit != "outside" else self.down(y) * gate


def told(habit):
    place = Placement.of(state(tp=2))
    torch.manual_seed(0)
    module = Gated(place, habit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            if step == 1:
                with torch.no_grad():
                    module(torch.ones(2, 6))  # an evaluation between
                copy.deepcopy(module)
                torch.save(module.state_dict(), io.BytesIO())
            module(
                torch.randn(5, 6, generator=torch.Generator().manual_seed(step)).double()
            ).square().sum().backward()
    return [str(w.message) for w in caught if "gets another gradient on each" in str(w.message)]


@pytest.mark.parametrize("habit", ["copied", "outside", "alone", "one rank"])
def test_a_gate_of_a_row_linear(ranks, habit):
    for messages in ranks(told, habit, world=2):
        assert len(messages) == (habit in ("alone", "one rank"))
        assert all(message.startswith("gate returns the same on all 2 tensor ranks") for message in messages)
