"""Boxes and flat intervals against numpy's own indexing."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.parallel_state.flat import (
    PART_ALIGN,
    Entry,
    bucket_table,
    extent,
    flat_boxes,
    flat_intervals,
    intersect,
    is_vector,
    relative,
    shifted,
    slices,
    volume,
    whole,
)

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


@given(st.data(), shapes)
def test_a_box_is_its_flat_intervals(data, shape):
    box = data.draw(boxes_of(shape))
    found = flat_intervals(shape, box)
    inside = np.flatnonzero(mask(shape, box).reshape(-1))
    assert [i for interval in found for i in range(*interval)] == list(inside)
    assert all(a < b for a, b in found) and all(b < c for (_, b), (c, _) in pairwise(found)), "joined"


entries = st.lists(
    st.builds(
        Entry,
        name=st.uuids().map(str),
        size=st.integers(1, 300),
        unit=st.sampled_from(["", "layers.0", "layers.1"]),
        stage=st.integers(0, 1),
        group=st.sampled_from(["dp-cp", "edp"]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        vector=st.booleans(),
        tied=st.booleans(),
    ),
    max_size=12,
)


@given(entries, st.integers(1, 5), st.integers(1, 3), st.integers(1, 400))
def test_buckets_hold_every_parameter_once_and_are_cut_equally(entries, dp, edp, bucket_size):
    ranks = {"dp-cp": dp, "edp": edp}
    table = bucket_table(entries, ranks, bucket_size)
    by_name = {entry.name: entry for entry in entries}
    assert sorted(slot.name for bucket in table for slot in bucket.slots) == sorted(by_name)
    for bucket in table:
        members, n = [by_name[slot.name] for slot in bucket.slots], ranks[bucket.group]
        assert len({entry.key for entry in members}) == 1, "one stage, unit, group, dtype, kind"
        assert [slot.start for slot in bucket.slots] == [0, *(slot.stop for slot in bucket.slots[:-1])], "no gaps"
        assert [slot.stop - slot.start for slot in bucket.slots] == [entry.size for entry in members]
        used = bucket.slots[-1].stop
        assert used <= bucket.size < used + n * PART_ALIGN and bucket.size % (n * PART_ALIGN) == 0, (
            "padding at the end only"
        )
        cuts = [bucket.cut(n, rank) for rank in range(n)]
        assert [c for cut in cuts for c in cut][1:-1:2] == [c for cut in cuts for c in cut][2::2]
        assert {b - a for a, b in cuts} == {bucket.size // n} and (cuts[0][0], cuts[-1][1]) == (0, bucket.size)
        assert all(a % PART_ALIGN == 0 for a, _ in cuts)
        odd = [entry.size % PART_ALIGN != 0 for entry in members]
        assert odd == sorted(odd), "odd sizes last: the others are aligned"
        order = sorted(members, key=lambda entry: -entries.index(entry))
        assert sum(entry.size for entry in order[:-1]) < bucket_size, "closed as soon as it is full"


def test_buckets_come_in_the_order_in_which_backward_completes_them():
    names = [
        ("embedding", ""),
        ("layers.0.w", "layers.0"),
        ("layers.0.norm", "layers.0"),
        ("layers.1.w", "layers.1"),
        ("head", ""),
    ]
    table = bucket_table([Entry(n, 64, unit, vector="norm" in n) for n, unit in names], {"dp-cp": 1}, 64)
    assert [bucket.slots[0].name for bucket in table] == [
        "head",
        "layers.1.w",
        "layers.0.norm",
        "layers.0.w",
        "embedding",
    ]
    assert table[2].unit == "", "vectors belong to the stage"
    with pytest.raises(ValueError, match="bucket_size=0 must be at least 1"):
        bucket_table([], {}, 0)


def test_biases_and_single_dims_are_vectors():
    assert is_vector("linear.bias", (4, 3)) and is_vector("norm.weight", (4,)) and is_vector("scale", ())
    assert not is_vector("linear.weight", (4, 3)) and not is_vector("bias.weight", (4, 3))
