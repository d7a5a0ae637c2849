"""Boxes and flat intervals against numpy's own indexing."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.parallel_state.flat import extent, flat_boxes, intersect, relative, shifted, slices, volume, whole

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_of(draw, shape, least=0):
    starts = [draw(st.integers(0, n - least)) for n in shape]
    return tuple((start, draw(st.integers(start + least, n))) for start, n in zip(starts, shape, strict=True))


def mask(shape, box):
    inside = np.zeros(shape, bool)
    inside[slices(box)] = True
    return inside


@given(st.data(), shapes)
def test_a_flat_interval_is_its_boxes_in_order(data, shape):
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    numbers = np.arange(prod(shape)).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = [numbers[slices(box)].reshape(-1) for box in boxes]
    assert [*np.concatenate([[], *found])] == list(range(start, stop))
    assert all(volume(box) == part.size > 0 for box, part in zip(boxes, found, strict=True))


@given(shapes)
def test_all_of_a_tensor_is_one_box(shape):
    assert flat_boxes(shape, 0, prod(shape)) == [whole(shape)]
    assert extent(whole(shape)) == shape


def test_the_worst_case_takes_two_boxes_per_dim_but_one():
    assert flat_boxes((3, 4, 5), 7, 53) == [
        ((0, 1), (1, 2), (2, 5)),
        ((0, 1), (2, 4), (0, 5)),
        ((1, 2), (0, 4), (0, 5)),
        ((2, 3), (0, 2), (0, 5)),
        ((2, 3), (2, 3), (0, 3)),
    ]


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 13)])
def test_an_interval_outside_of_the_tensor_is_refused(start, stop):
    with pytest.raises(ValueError, match=rf"{start}\.\.{stop} is not inside the 12 elements of \(3, 4\)"):
        flat_boxes((3, 4), start, stop)


@given(st.data(), shapes)
def test_what_two_boxes_share_is_where_both_masks_are_set(data, shape):
    a, b = (data.draw(boxes_of(shape)) for _ in range(2))
    in_both = mask(shape, a) & mask(shape, b)
    common = intersect(a, b)
    assert (common is None) == (not in_both.any())
    if common is not None:
        assert (mask(shape, common) == in_both).all() and volume(common) == in_both.sum()


@given(st.data(), shapes)
def test_relative_indexes_a_cut_as_the_box_indexes_the_whole(data, shape):
    numbers = np.arange(prod(shape)).reshape(shape)
    outer = data.draw(boxes_of(shape, least=1))
    inside = data.draw(boxes_of(extent(outer), least=1))
    box = shifted(inside, [start for start, _ in outer])
    assert relative(box, outer) == inside
    assert (numbers[slices(outer)][slices(inside)] == numbers[slices(box)]).all()


def test_boxes_of_tensors_with_other_dims_are_not_compared():
    with pytest.raises(ValueError, match="zip"):
        intersect(((0, 1),), ((0, 1), (0, 2)))
