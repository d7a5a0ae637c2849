"""Activations that were followed and kept go to a file like any tensor."""

import io

import torch
from torch import nn

from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear
from tests.states import state


class Keeps(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.up, self.down = ColumnParallelLinear(4, 8, place=place), RowParallelLinear(8, 4, place=place)
        self.kept = []

    def forward(self, x):
        y = torch.tanh(self.up(x))
        self.kept += [y.detach(), y.detach().sum(-1), y.detach().max(-1).indices]
        return self.down(y)


def filed():
    module = Keeps(Placement.of(state(tp=2)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        module(torch.ones(2, 4).double()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for kept in module.kept:
        file = io.BytesIO()
        torch.save(kept, file)
        file.seek(0)
        loaded = torch.load(file)
        assert type(loaded) is torch.Tensor
        assert torch.equal(loaded, kept)


def test_kept_activations_go_to_files(ranks):
    ranks(filed, world=2)
