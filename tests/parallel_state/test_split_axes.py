"""Split dims followed through views, cuts and products: against whole tensors, on every rank's part."""

import pytest
import torch

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_axes import (
    are_blocks,
    axes_of_columns,
    broadcast,
    cut,
    is_split,
    plain,
    reshaped,
)

TP = 2


def test_a_fused_matrix_is_split_inside_each_part():
    axes = axes_of_columns((4, 5, 24), (3, 8), 1)
    assert axes == (((4, False),), ((5, False),), ((3, False), (8, True)))
    heads = reshaped(axes, (4, 5, 3, 2, 4))
    assert [is_split(heads, [dim]) for dim in range(5)] == [False, False, False, True, False]
    assert reshaped(heads, (4, 5, 24)) == (axes[0], axes[1], ((3, False), (2, True), (4, False)))
    assert cut(axes, 2, 8, 16) == (axes[0], axes[1], ((8, True),))
    assert cut(axes, 2, 0, 12) is None


def test_a_flat_matrix_is_split_first():
    axes = axes_of_columns((4, 5, 24), (24,), 0)
    by_part = reshaped(axes, (4, 5, 3, 2, 4))
    assert is_split(by_part, [2]) and not is_split(by_part, [3, 4])
    assert cut(axes, 2, 0, 12) is None and cut(axes, 2, 0, 24) == axes


def test_a_head_alone_on_its_rank_is_not_taken_for_a_split_width():
    axes = axes_of_columns((4, 5, 8), (8,), 0)
    assert reshaped(axes, (4, 5, 1, 8)) is None
    assert is_split(reshaped(axes, (4, 5, 2, 4)), [2])


def test_dims_that_end_within_others_are_not_followed():
    assert reshaped(axes_of_columns((4, 6), (6,), 0), (3, 8)) is None
    assert reshaped(plain((4, 6)), (3, 8)) is None


def test_blocks_are_what_a_row_linear_takes():
    assert are_blocks(axes_of_columns((2, 8), (8,), 0))
    assert not are_blocks(axes_of_columns((2, 16), (2, 8), 1))
    assert are_blocks(reshaped(reshaped(axes_of_columns((2, 8), (8,), 0), (2, 2, 4)), (2, 8)))


def test_broadcasting_keeps_split_dims_where_they_are():
    axes = axes_of_columns((3, 8), (8,), 0)
    assert broadcast(axes, (5, 3, 8)) == (((5, False),), *axes)
    assert broadcast(axes, (3, 1)) is None
    assert split_axes.without(axes, [0]) == axes[1:] and split_axes.without(axes, [0], keepdim=True) == ((), axes[1])


@pytest.mark.parametrize("sizes, split_dim", [((24,), 0), ((3, 8), 1), ((2, 12), 1)])
@pytest.mark.parametrize("shape", [(2, 24), (2, 3, 8), (2, 2, 12), (2, 3, 2, 4), (2, 2, 3, 4)])
def test_views_agree_with_the_whole(sizes, split_dim, shape):
    """What is said of a view: joining the ranks' views along the split dim gives a view of the whole."""
    whole_sizes = [size * (TP if dim == split_dim else 1) for dim, size in enumerate(sizes)]
    whole = torch.arange(2 * 24 * TP).view(2, *whole_sizes)
    parts = [part.reshape(2, 24).view(shape) for part in whole.chunk(TP, 1 + split_dim)]
    found = reshaped(axes_of_columns((2, 24), sizes, split_dim), shape)
    if found is None:
        return
    places = [dim for dim in range(len(shape)) if is_split(found, [dim])]
    assert len(places) == 1
    if are_blocks((*found[: places[0]], found[places[0]])):
        joined = torch.cat(parts, places[0])
        assert torch.equal(joined.reshape(-1), whole.reshape(-1))
