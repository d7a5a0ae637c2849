"""Parts of a module that a method of its own calls are compared over tensor ranks, too."""

import warnings

import pytest
import torch
from torch import nn

from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear
from tests.states import state

CLASSES = 12


class Decoder(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 8).double()
        self.up = ColumnParallelLinear(8, 16, place=place)
        self.down = RowParallelLinear(16, CLASSES, place=place)

    def forward(self, ids):
        return self.decode(ids)

    def decode(self, ids):
        return self.down(torch.tanh(self.up(self.table(ids))))


def told(seed_by_rank):
    ps = state(tp=2)
    torch.manual_seed(0)
    module = Decoder(Placement.of(ps)).double()
    generator = torch.Generator().manual_seed(7 + seed_by_rank * ps.index("tp"))
    ids = torch.zeros(4, dtype=torch.int64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(ids).sum().backward()
        with torch.no_grad():
            for _ in range(8):
                ids = torch.multinomial(module.decode(ids).softmax(-1), 1, generator=generator)[:, 0]
    return [str(w.message) for w in caught if "another x on each of tensor ranks" in str(w.message)]


@pytest.mark.parametrize("seed_by_rank", [False, True])
def test_sampling_by_a_method_of_its_own(ranks, seed_by_rank):
    for messages in ranks(told, seed_by_rank, world=2):
        assert len(messages) == seed_by_rank
