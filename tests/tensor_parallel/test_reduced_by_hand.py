"""Experts that a program splits over tensor ranks by hand: what their router's gradient lacks is told."""

import warnings

import pytest
import torch
from torch import nn

from core.parallel_state.collectives import all_reduce
from core.parallel_state.layout import Layout, set_layout
from core.tensor_parallel import copy_to_tensor_region, reduce_from_tensor_region
from tests.states import state

NUM_EXPERTS, WIDTH = 4, 6


class Experts(nn.Module):
    """Each tensor rank computes its experts of all tokens."""

    def __init__(self, ps, habit):
        super().__init__()
        self.group, self.habit = ps.group("tp"), habit
        count = NUM_EXPERTS // ps.size("tp")
        first = ps.index("tp") * count
        self.mine = slice(first, first + count)
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS).double()
        whole = torch.randn(NUM_EXPERTS, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(whole[self.mine].clone())
        if habit == "layout" and self.group is not None:
            set_layout(self.weight, Layout(tuple(whole.shape), {"tp": 0}))

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        if self.habit in ("both", "inputs alone"):
            x = copy_to_tensor_region(x, self.group)
        if self.habit == "both":
            gates = copy_to_tensor_region(gates, self.group)
        part = torch.einsum("bw,ewv,be->bv", x, self.weight, gates[:, self.mine])
        return reduce_from_tensor_region(part, self.group)


def train(habit):
    """(router's weight after three steps, what was told) of this rank, and of one process."""
    found = []
    state(tp=2).group("tp").reduced_by_hand = None  # an earlier program's
    for ps in (state(tp=2), state(tp=1)):
        module = Experts(ps, habit)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                module(x).square().mean().backward()
                if habit == "summed by hand" and module.group is not None:
                    for parameter in module.router.parameters():
                        all_reduce(parameter.grad, module.group)
                optimizer.step()
                optimizer.zero_grad()
        found += [module.router.weight.detach(), [str(w.message) for w in caught]]
    return found


@pytest.mark.parametrize("habit", ["both", "summed by hand", "neither", "layout", "inputs alone"])
def test_a_router_before_a_sum_by_hand(ranks, habit):
    for weight, told, whole, told_alone in ranks(train, habit, world=2):
        assert told_alone == []
        if habit in ("both", "summed by hand"):
            assert told == []
            assert torch.allclose(weight, whole, rtol=1e-12)
        else:
            assert len(told) == 1
            assert f"a parameter of shape [{NUM_EXPERTS}, {WIDTH}] was the same on tensor ranks [0, 1]" in told[0]
            assert not torch.allclose(weight, whole, rtol=1e-6)
