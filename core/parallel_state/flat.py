"""Boxes of a tensor, intervals of its flat form, and parameters laid into buckets, as integers: no process, no torch.

A box is one half-open interval per dim, `((0, 4), (8, 16))`; of a tensor without dims it is `()`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from math import prod
from operator import itemgetter

Box = tuple[tuple[int, int], ...]


def whole(shape: Iterable[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, n) for n in shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of what a box cuts out."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """How many elements a box holds."""
    elements = 1
    for start, stop in box:
        elements *= stop - start
    return elements


def intersect(box: Box, other: Box) -> Box | None:
    """What two boxes of one tensor share; None if nothing."""
    shared = []
    for (start, stop), (other_start, other_stop) in zip(box, other, strict=True):
        # comparisons instead of max() and min(), whose calls took most of the time of a checkpoint's plan
        first = start if start > other_start else other_start
        last = stop if stop < other_stop else other_stop
        if first >= last:
            return None
        shared.append((first, last))
    return tuple(shared)


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
        raise ValueError(
            f"the interval {start}..{stop} is not inside the {prod(shape)} elements of {tuple(shape)}"
        )
    if start == stop:
        return []
    if not shape:
        return [()]
    # Rows of the first dim: the first and the last may be cut, those between are one box.
    row = prod(shape[1:])
    first = start // row
    last = (stop - 1) // row
    # elements of the first row before the interval, and of the last row inside it
    head = start - first * row
    tail = stop - last * row
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


def flat_intervals(shape: tuple[int, ...], box: Box) -> list[tuple[int, int]]:
    """The elements of a box as intervals [start, stop) of the tensor's C-order flat form, ascending and joined."""
    if not volume(box):
        return []
    if not shape:
        return [(0, 1)]
    # behind the last dim that the box cuts everything is contiguous
    cut = max((d for d in range(len(shape)) if box[d] != (0, shape[d])), default=0)
    row = prod(shape[cut + 1 :])
    starts = [0]
    for dim in range(cut):
        starts = [offset * shape[dim] + i for offset in starts for i in range(*box[dim])]
    first, last = box[cut]
    return [
        ((offset * shape[cut] + first) * row, (offset * shape[cut] + last) * row)
        for offset in starts
    ]


# elements: every rank's shard begins at a multiple, so that vector kernels group elements alike on any layout
PART_ALIGN = 64


def is_vector(name: str, shape: Sequence[int]) -> bool:
    """A bias, or of at most one dim: not decayed, and small enough to be gathered with its pipeline stage."""
    return name.rpartition(".")[2] == "bias" or len(shape) <= 1


@dataclass(frozen=True)
class Entry:
    """A parameter to be laid into a bucket.

    size: elements of its local part, padded rows included. unit: the module with which it is gathered and freed; ""
    for the rest of its stage. stage: number of the first stage that holds it. group: over which its gradient is
    summed and cut. tied: also held by another pipeline rank, so it must lie there as here.
    """

    name: str
    size: int
    unit: str = ""
    stage: int = 0
    group: str = "dp-cp"
    dtype: str = "float32"
    vector: bool = False
    tied: bool = False

    @property
    def key(self) -> tuple:
        """What all parameters of a bucket share. Vectors of all layers lie together: they are too small to move."""
        return (
            self.stage,
            "" if self.vector else self.unit,
            self.group,
            self.dtype,
            self.vector,
            self.tied,
        )


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its bucket."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced, updated and gathered together: contiguous, then padding up to `size`."""

    stage: int
    unit: str
    group: str
    dtype: str
    vector: bool
    slots: tuple[Slot, ...]
    size: int

    def cut(self, ranks: int, rank: int) -> tuple[int, int]:
        """The equal shard of `rank`: half-open, in elements of the bucket."""
        shard_size = self.size // ranks
        return rank * shard_size, (rank + 1) * shard_size


def bucket_table(
    entries: Sequence[Entry], ranks: Mapping[str, int], bucket_size: int
) -> tuple[Bucket, ...]:
    """Every parameter in one bucket; buckets in the order in which backward completes them.

    entries: in the order of execution, as modules name their parameters. ranks: over how many each group is cut. A
    bucket takes parameters of one key, last used first, until it has `bucket_size` elements; it is padded at its end
    to a multiple of ranks x PART_ALIGN, so that every rank's shard is equal and begins at a multiple of PART_ALIGN.
    Inside it, sizes that are no multiple of PART_ALIGN come last: the others begin where kernels want them.
    Raises ValueError: bucket_size below 1.
    """
    if bucket_size < 1:
        raise ValueError(f"bucket_size={bucket_size} must be at least 1 element")
    # Walk backwards, as backward does: the bucket that is full first is complete first.
    closed: list[tuple[int, list[Entry]]] = []  # (position of its last entry, entries)
    filling: dict[tuple, list[Entry]] = {}
    sizes: dict[tuple, int] = {}
    for position, entry in enumerate(reversed(entries)):
        key = entry.key
        filling.setdefault(key, []).append(entry)
        sizes[key] = sizes.get(key, 0) + entry.size
        if sizes[key] >= bucket_size:
            closed.append((position, filling.pop(key)))
            del sizes[key]
    # buckets that never filled are complete with their last parameter
    last = {entry.name: position for position, entry in enumerate(reversed(entries))}
    closed += [(last[members[-1].name], members) for members in filling.values()]
    return tuple(
        _bucket(members, ranks[members[0].group])
        for _, members in sorted(closed, key=itemgetter(0))
    )


def _bucket(members: list[Entry], ranks: int) -> Bucket:
    slots = []
    offset = 0
    # stable: among equals the order of backward stays
    for entry in sorted(members, key=lambda entry: entry.size % PART_ALIGN != 0):
        slots.append(Slot(entry.name, offset, offset + entry.size))
        offset += entry.size
    first = members[0]
    step = ranks * PART_ALIGN
    unit = "" if first.vector else first.unit
    # parameters without elements have a bucket too
    size = -(-offset // step) * step or step
    return Bucket(first.stage, unit, first.group, first.dtype, first.vector, tuple(slots), size)
