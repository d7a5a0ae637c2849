"""The canonical grid: which cells an array is stored in, whoever writes it. No process, no torch.

The cells follow from the shape and the dim that tensor parallelism cuts, never from the dtype: every state of a
parameter has the same grid, so one plan serves all. Sizes are elements, counted as 4 bytes.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import isqrt, prod

from core.dist_checkpointing.format.arrays import ArrayInfo, Index
from core.parallel_state.flat import Box, extent, shifted, volume, whole

MIN, MAX = 2**18, 2**22  # elements of a cell: 1 and 16 MiB
ROWS = 16  # a ragged dim is cut at multiples of it, so that its cells divide further


def cell_shape(
    shape: tuple[int, ...], tp_dim: int | None, *, stacked: bool = False, ragged: bool = False, parts: int = 8
) -> tuple[int, ...]:
    """The shape of an array's cells; the last ones along a dim may be short.

    parts: cut `tp_dim` for tensor parallelism of this size, and of its divisors.
    Raises ValueError: a dim of size 0, a `tp_dim` that is not there.
    """
    _check(shape, tp_dim, stacked)
    layer = prod(shape[1:] if stacked else shape)
    if stacked and layer < MIN:
        return (_divisor(shape[0], MAX // layer), *shape[1:])
    cell = [1, *shape[1:]] if stacked else list(shape)
    if tp_dim is not None:
        last = tp_dim == len(shape) - 1
        # half the floor: 2.25 MiB of an attention output at h 768 have four cells, so that TP=4 reads no half cells
        least = MIN // 2 * (1 if last else prod(cell[:tp_dim]))
        rows = round_up(-(-shape[tp_dim] // parts)) * parts if ragged else shape[tp_dim]
        fitting = (g for g in range(parts, 1, -1) if parts % g == rows % g == 0 and layer >= g * least)
        if cuts := next(fitting, 0):
            cell[tp_dim] = rows // cuts
            cell[:tp_dim] = cell[:tp_dim] if last else [1] * tp_dim
        elif ragged:
            cell[tp_dim] = round_up(shape[tp_dim])
    return _limited(cell, MAX, MIN)


def cell_of(info: ArrayInfo) -> tuple[int, ...]:
    """The shape of the cells of an array."""
    return cell_shape(info.shape, info.tp_dim, stacked=info.stacked, ragged=info.ragged)


def inner_shape(cell: tuple[int, ...]) -> tuple[int, ...] | None:
    """The pieces that a cell can be read in, at most 1 MiB each, contiguous in it; None for a cell up to 1 MiB."""
    return _limited(cell, MIN) if prod(cell) > MIN else None


def cells(shape: tuple[int, ...], cell: tuple[int, ...], box: Box | None = None) -> Iterator[tuple[Index, Box]]:
    """Index and box of every cell that touches `box` (default: of all), clipped to the array, in C order."""
    axes = [
        [(i, (i * size, min(i * size + size, n))) for i in range(start // size, -(-stop // size))]
        for n, size, (start, stop) in zip(shape, cell, whole(shape) if box is None else box, strict=True)
    ]
    for cut in product(*axes):
        yield tuple([i for i, _ in cut]), tuple([interval for _, interval in cut])


def blocks(box: Box) -> Iterator[Box]:
    """A box in parts of at most 16 MiB, contiguous in it and in its C order."""
    shape = extent(box)
    if volume(box):
        for _, block in cells(shape, _limited(shape, MAX, MIN)):
            yield shifted(block, [start for start, _ in box])


def cell_name(index: Index) -> str:
    """The file of a cell, below its array: `c.0.3`."""
    return ".".join(["c", *map(str, index)])


def read_bytes(info: ArrayInfo, boxes: Iterable[Box]) -> tuple[int, int]:
    """(bytes in `boxes`, bytes that reading them takes): what is checked by one checksum is read as a whole, once."""
    cell = cell_of(info)
    piece = inner_shape(cell) or cell
    needed = 0
    touched: set[Index] = set()
    for box in boxes:
        needed += volume(box)
        touched.update(index for index, _ in cells(info.shape, piece, box))
    return needed * info.itemsize, len(touched) * prod(piece) * info.itemsize


def _check(shape: tuple[int, ...], tp_dim: int | None, stacked: bool) -> None:
    for dim, n in enumerate(shape):
        if n < 1:
            raise ValueError(f"dim {dim} of {shape} has size {n}: nothing to store; leave the tensor out")
    if (stacked and not shape) or (tp_dim is not None and not stacked <= tp_dim < len(shape)):
        axis = "with a stack axis" if stacked else "without a stack axis"
        raise ValueError(f"tensor-parallel dim {tp_dim} does not fit the shape {shape} {axis}; dims count from 0")


def _limited(cell: Iterable[int], limit: int, least: int = 0) -> tuple[int, ...]:
    """Cut from the left until at most `limit` elements are left, by divisors: a file's last cells have full size.

    Where no divisor leaves `least`, in even parts: 128257 rows would become as many files.
    """
    cut = list(cell)
    for dim, n in enumerate(cut):
        if prod(cut) <= limit:
            break
        rest = prod(cut[dim + 1 :])
        cut[dim] = _divisor(n, max(1, limit // rest))
        if cut[dim] * rest < least:
            most = limit // rest // ROWS * ROWS
            cut[dim] = round_up(-(-n // -(-n // most)))
    return tuple(cut)


def _divisor(n: int, most: int) -> int:
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return max(d for pair in small for d in (pair, n // pair) if d <= most)


def round_up(n: int) -> int:
    """Rows of a ragged dim: to full multiples of 16."""
    return -(-n // ROWS) * ROWS
