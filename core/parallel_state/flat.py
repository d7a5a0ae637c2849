"""Boxes of a tensor and intervals of its flat form, as integers: no process, no torch.

A box is one half-open interval per dim, `((0, 4), (8, 16))`; of a tensor without dims it is `()`.
"""

from collections.abc import Iterable
from itertools import starmap
from math import prod

Box = tuple[tuple[int, int], ...]


def whole(shape: Iterable[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, n) for n in shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of what a box cuts out."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """How many elements a box holds."""
    return prod(extent(box))


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share; None if nothing."""
    both = []
    for (start, stop), (other_start, other_stop) in zip(a, b, strict=True):
        first, last = max(start, other_start), min(stop, other_stop)
        if first >= last:
            return None
        both.append((first, last))
    return tuple(both)


def relative(box: Box, outer: Box) -> Box:
    """`box` as seen from the first element of `outer`."""
    return tuple((start - o, stop - o) for (start, stop), (o, _) in zip(box, outer, strict=True))


def shifted(box: Box, offset: Iterable[int]) -> Box:
    """`box` moved by `offset`: the inverse of `relative`."""
    return tuple((start + o, stop + o) for (start, stop), o in zip(box, offset, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """For indexing an array."""
    return tuple(starmap(slice, box))


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a tensor's C-order flat form as boxes in that order, at most 2 * dims - 1.

    Each box is contiguous in the flat form. Raises ValueError: an interval that is not inside the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"the interval {start}..{stop} is not inside the {prod(shape)} elements of {tuple(shape)}")
    if start == stop:
        return []
    if not shape:
        return [()]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    head, tail = start - first * row, stop - last * row
    if first == last and (head or tail < row):  # inside one row
        return [((first, first + 1), *box) for box in flat_boxes(shape[1:], head, tail)]
    boxes: list[Box] = []
    if head:
        boxes += [((first, first + 1), *box) for box in flat_boxes(shape[1:], head, row)]
        first += 1
    full = last if tail < row else last + 1
    if first < full:
        boxes.append(((first, full), *whole(shape[1:])))
    if tail < row:
        boxes += [((last, last + 1), *box) for box in flat_boxes(shape[1:], 0, tail)]
    return boxes
