"""The canonical grid: which cells an array is stored in, whoever writes it. No process, no torch.

A cell is what one file holds of one array. The cells follow from the shape and from the dim that tensor parallelism
cuts, never from the dtype or from the layout that writes: every state of a parameter has the same grid, so one plan
serves all, and any layout reads any other's cells. Sizes are elements, counted as 4 bytes each.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import isqrt, prod

from core.dist_checkpointing.format.arrays import ArrayInfo, Index
from core.parallel_state.flat import Box, extent, shifted, volume, whole

MIN, MAX = 2**18, 2**22  # elements of a cell: 1 and 16 MiB
# a ragged dim is cut at multiples of it, so that its cells divide further
ROWS = 16


def cell_shape(
    shape: tuple[int, ...],
    tp_dim: int | None,
    *,
    stacked: bool = False,
    ragged: bool = False,
    tp_sizes: int = 8,
) -> tuple[int, ...]:
    """The shape of an array's cells; the last ones along a dim may be short.

    tp_sizes: cut `tp_dim` for tensor parallelism of this size, and of its divisors.
    Raises ValueError: a dim of size 0, a `tp_dim` that is not there.
    """
    _check(shape, tp_dim, stacked)
    layer_elements = prod(shape[1:] if stacked else shape)
    if stacked and layer_elements < MIN:
        # small layers share a cell: one file per layer's bias would cost more to open than to read
        return (_largest_divisor(shape[0], MAX // layer_elements), *shape[1:])
    cell = [1, *shape[1:]] if stacked else list(shape)
    if tp_dim is not None:
        is_last_dim = tp_dim == len(shape) - 1
        # half the floor: 2.25 MiB of an attention output at h 768 have four cells, so that TP=4 reads no half cells
        min_elements = MIN // 2
        if not is_last_dim:
            min_elements *= prod(cell[:tp_dim])
        rows = shape[tp_dim]
        if ragged:  # as it is padded in memory
            rows = round_up(-(-rows // tp_sizes)) * tp_sizes
        # the largest number of cuts that divides `tp_sizes`, and the rows, and leaves cells that are not too small
        for cuts in range(tp_sizes, 1, -1):
            if tp_sizes % cuts == rows % cuts == 0 and layer_elements >= cuts * min_elements:
                cell[tp_dim] = rows // cuts
                if not is_last_dim:
                    cell[:tp_dim] = [1] * tp_dim
                break
        else:
            if ragged:
                cell[tp_dim] = round_up(shape[tp_dim])
    return _cut_to_limit(cell, MAX, MIN)


def cell_of(info: ArrayInfo) -> tuple[int, ...]:
    """The shape of the cells of an array."""
    return cell_shape(info.shape, info.tp_dim, stacked=info.stacked, ragged=info.ragged)


def inner_shape(cell: tuple[int, ...]) -> tuple[int, ...] | None:
    """The inner chunks that a cell can be read in: at most 1 MiB each, contiguous in it. None: a cell up to 1 MiB."""
    if prod(cell) > MIN:
        return _cut_to_limit(cell, MIN)
    return None


def cells(
    shape: tuple[int, ...], cell: tuple[int, ...], box: Box | None = None
) -> Iterator[tuple[Index, Box]]:
    """Index and box of every cell that touches `box` (default: of all), clipped to the array, in C order."""
    touched = whole(shape) if box is None else box
    positions_by_dim = []
    for size, step, (start, stop) in zip(shape, cell, touched, strict=True):
        positions = range(start // step, -(-stop // step))
        positions_by_dim.append([(i, (i * step, min(i * step + step, size))) for i in positions])
    for position in product(*positions_by_dim):
        yield tuple([i for i, _ in position]), tuple([interval for _, interval in position])


def blocks(box: Box) -> Iterator[Box]:
    """A box in blocks of at most 16 MiB, each contiguous in it, in its C order."""
    shape = extent(box)
    if volume(box):
        for _, block in cells(shape, _cut_to_limit(shape, MAX, MIN)):
            yield shifted(block, [start for start, _ in box])


def cell_name(index: Index) -> str:
    """The file of a cell, below its array: `c.0.3`."""
    return ".".join(["c", *map(str, index)])


def read_bytes(info: ArrayInfo, boxes: Iterable[Box]) -> tuple[int, int]:
    """(bytes in `boxes`, bytes that reading them takes): what is checked by one checksum is read as a whole, once."""
    cell = cell_of(info)
    unit = inner_shape(cell) or cell
    needed = 0
    touched: set[Index] = set()
    for box in boxes:
        needed += volume(box)
        touched.update(index for index, _ in cells(info.shape, unit, box))
    return needed * info.itemsize, len(touched) * prod(unit) * info.itemsize


def _check(shape: tuple[int, ...], tp_dim: int | None, stacked: bool) -> None:
    for dim, size in enumerate(shape):
        if size < 1:
            raise ValueError(
                f"dim {dim} of {shape} has size {size}: nothing to store; leave the tensor out"
            )
    if (stacked and not shape) or (tp_dim is not None and not stacked <= tp_dim < len(shape)):
        axis = "with a stack axis" if stacked else "without a stack axis"
        raise ValueError(
            f"tensor-parallel dim {tp_dim} does not fit the shape {shape} {axis}; dims count from 0"
        )


def _cut_to_limit(cell: Iterable[int], limit: int, min_elements: int = 0) -> tuple[int, ...]:
    """Cut from the left until at most `limit` elements are left, by divisors: a file's last cells have full size.

    Where no divisor leaves `min_elements`, in even parts: 128257 rows would become as many files.
    """
    limited = list(cell)
    for dim, size in enumerate(limited):
        if prod(limited) <= limit:
            break
        row_elements = prod(limited[dim + 1 :])
        limited[dim] = _largest_divisor(size, max(1, limit // row_elements))
        if limited[dim] * row_elements < min_elements:
            max_rows = limit // row_elements // ROWS * ROWS
            even_parts = -(-size // max_rows)
            limited[dim] = round_up(-(-size // even_parts))
    return tuple(limited)


def _largest_divisor(size: int, limit: int) -> int:
    """The largest divisor of `size` up to `limit`."""
    largest = 1
    for small in range(1, isqrt(size) + 1):
        if size % small == 0:
            # divisors come in pairs around the square root
            for divisor in (small, size // small):
                if largest < divisor <= limit:
                    largest = divisor
    return largest


def round_up(rows: int) -> int:
    """Rows of a ragged dim: to full multiples of 16."""
    return -(-rows // ROWS) * ROWS
