"""An array taken as of another shape: which boxes of it fill a box of that shape. Nothing is copied.

Both shapes are refined to common finer dims: (6, 4) and (2, 12) are both made of (2, 3, 4). A box of one shape is
cut into boxes of the finer dims, each of which is one box of the other shape, too.
"""

from collections.abc import Iterator
from itertools import pairwise, product
from math import prod

from torch import Tensor

from core.parallel_state.flat import Box, extent, flat_boxes, relative, slices

Shape = tuple[int, ...]
# of each dim, which of the finer dims it is made of, as [first, end)
Spans = list[tuple[int, int]]


def resolved_shape(requested: Shape, shape: Shape) -> Shape:
    """`requested` with its -1 replaced. Raises ValueError: another number of elements, or it cuts across dims."""
    # positive where one dim is -1, or three, which are refused below
    known_elements = -prod(requested)
    resolved = requested
    if known_elements > 0:
        inferred = prod(shape) // known_elements
        resolved = tuple(inferred if size == -1 else size for size in requested)
    if (
        requested.count(-1) > 1
        or prod(resolved) != prod(shape)
        or any(size < 1 for size in resolved)
    ):
        raise ValueError(
            f"{shape} has {prod(shape)} elements, {requested} has {abs(prod(resolved))}; give another shape"
        )
    # raises where dims would be cut across
    _finer_dims(_without_ones(shape), _without_ones(resolved))
    return resolved


def straight_boxes(
    shape: Shape, view: Shape, box: Box, memory: Tensor
) -> Iterator[tuple[Box, Tensor]]:
    """(box of an array of `shape`, the memory of that extent) that together fill `memory`.

    `memory` is `box` of the same array taken as of shape `view`. What comes out is one box on both sides.
    """
    finer, array_spans, view_spans = _finer_dims(_without_ones(shape), _without_ones(view))
    # dims of one element lie nowhere: they are dropped here and come back in `_array_boxes`
    memory = memory[tuple(slice(None) if size > 1 else 0 for size in view)]
    intervals = [interval for interval, size in zip(box, view, strict=True) if size > 1]
    counted_boxes = []
    for (first, end), interval in zip(view_spans, intervals, strict=True):
        counted_boxes.append(list(_with_positions(flat_boxes(tuple(finer[first:end]), *interval))))
    for combination in product(*counted_boxes):
        # one box for each dim of the view: together a box of the finer dims
        finer_box: Box = ()
        for dim_box, _, _ in combination:
            finer_box += dim_box
        box_memory = memory[tuple(slice(start, stop) for _, start, stop in combination)]
        yield from _array_boxes(
            shape, finer, array_spans, finer_box, box_memory.view(extent(finer_box))
        )


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size > 1)


def _finer_dims(first: Shape, second: Shape) -> tuple[list[int], Spans, Spans]:
    """The dims of which both shapes are made, and the spans of each. Raises ValueError: there are none."""
    # the strides of both shapes, in elements: between two neighbours lies one finer dim
    strides = {1}
    for shape in (first, second):
        strides.update(prod(shape[dim:]) for dim in range(len(shape)))
    descending = sorted(strides, reverse=True)
    if any(outer % inner for outer, inner in pairwise(descending)):
        raise ValueError(
            f"{first} as {second} cuts across dims; only dims that are split or merged are read in parts"
        )
    finer = [outer // inner for outer, inner in pairwise(descending)]

    def spans(shape: Shape) -> Spans:
        edges = [descending.index(prod(shape[dim:])) for dim in range(len(shape))]
        return list(pairwise([*edges, len(finer)]))

    return finer, spans(first), spans(second)


def _with_positions(boxes: list[Box]) -> Iterator[tuple[Box, int, int]]:
    """Boxes that follow each other in memory, each with its first element and its end."""
    start = 0
    for box in boxes:
        stop = start + prod(extent(box))
        yield box, start, stop
        start = stop


def _array_boxes(
    shape: Shape, finer: list[int], spans: Spans, box: Box, memory: Tensor
) -> Iterator[tuple[Box, Tensor]]:
    """A box of the finer dims, and its memory, as boxes of the array of `shape`.

    Finer dims of one array dim that are no interval together are walked through, position by position.
    """
    position_ranges = []
    for first, end in spans:
        walked = _walked_dims(finer[first:end], box[first:end], memory.stride()[first:end])
        ranges = [range(*interval) for interval in box[first : first + walked]]
        position_ranges.append(list(product(*ranges)))
    for positions in product(*position_ranges):
        array_intervals: list[tuple[int, int]] = []
        finer_box: list[tuple[int, int]] = []
        for (first, end), walked_positions in zip(spans, positions, strict=True):
            fixed = [(position, position + 1) for position in walked_positions]
            intervals = fixed + list(box[first + len(walked_positions) : end])
            finer_box += intervals
            # where the first element lies in the array's dim: the finer positions as digits of one number
            start = 0
            for (position, _), size in zip(intervals, finer[first:end], strict=True):
                start = start * size + position
            array_intervals.append((start, start + prod(extent(tuple(intervals)))))
        box_memory = memory[slices(relative(tuple(finer_box), box))]
        remaining = iter(array_intervals)
        array_box = tuple(next(remaining) if size > 1 else (0, 1) for size in shape)
        yield array_box, box_memory.view(extent(array_box))


def _walked_dims(sizes: list[int], box: Box, strides: tuple[int, ...]) -> int:
    """How many of the finer dims of one dim are walked through, so that the rest is one interval, in memory too."""
    lengths = extent(box)
    for dim in range(len(sizes) - 1, 0, -1):
        rows = lengths[dim - 1]
        row_length = lengths[dim]
        if rows == 1:
            continue
        partial_rows = any(
            length != size for length, size in zip(lengths[dim:], sizes[dim:], strict=True)
        )
        if partial_rows or strides[dim - 1] != strides[dim] * row_length:
            return dim
    return 0
