"""A module of rows [b, s, h] under sequence parallelism, which takes dim 0 for the sequence."""

import pytest
import torch

from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear
from tests.states import state


def said_of(sequence_parallel):
    place = Placement.of(state(tp=2, sp=sequence_parallel))
    up = ColumnParallelLinear(8, 16, place=place)
    down = RowParallelLinear(16, 8, place=place)
    y = up(torch.randn(2, 3, 8))
    with pytest.raises(ValueError, match="RowParallelLinear got width 16") as told:
        down(torch.cat((y, y), -1))
    return str(told.value)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_width_is_told_with_the_sequence(ranks, sequence_parallel):
    for told in ranks(said_of, sequence_parallel, world=2):
        assert ("rows [b, s, h] want sequence_parallel=False" in told) == sequence_parallel
