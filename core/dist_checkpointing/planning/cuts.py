"""What the ranks of a tensor x pipeline parallel job hold of an array, and what reading it costs: arithmetic."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import gcd

from core.dist_checkpointing.format.arrays import ArrayInfo, Arrays
from core.dist_checkpointing.format.grid import round_up

Intervals = list[tuple[int, int]]


def cuts(info: ArrayInfo, tp: int, pp: int) -> list[Intervals]:
    """dim -> the intervals that ranks hold of it, in the order of tensor ranks or of pipeline stages.

    A vocabulary is cut as it is padded in memory, but only its true rows are counted: the last intervals may be
    short or empty.
    """
    intervals = [[(0, size)] for size in info.shape]
    if info.stacked:
        # of layers by their numbers in the model: a stage may hold none that has this parameter
        cuts_of_model = _even_cuts(info.model_layers, pp)
        numbers = info.layer_numbers
        intervals[0] = [
            (bisect_left(numbers, start), bisect_left(numbers, stop))
            for start, stop in cuts_of_model
        ]
    if info.cut_dim is not None:
        size = info.shape[info.cut_dim]
        intervals[info.cut_dim] = _padded_cuts(size, tp) if info.ragged else _even_cuts(size, tp)
    return intervals


def _even_cuts(size: int, ranks: int) -> Intervals:
    return list(pairwise(size * rank // ranks for rank in range(ranks + 1)))


def _padded_cuts(size: int, tp: int) -> Intervals:
    # padded as the embedding pads it: for 8 tensor ranks where tp divides 8, so that the sizes 1, 2, 4 and 8 agree
    padded_for = 8 if 8 % tp == 0 else tp
    rows_per_rank = round_up(-(-size // padded_for)) * padded_for // tp
    starts = range(0, rows_per_rank * tp, rows_per_rank)
    return [(min(start, size), min(start + rows_per_rank, size)) for start in starts]


def check_layout(arrays: Arrays, tp: int, pp: int) -> None:
    """Raises ValueError naming the arrays that cannot be cut so, and the numbers that can."""
    if tp < 1 or pp < 1:
        raise ValueError(f"tp={tp} and pp={pp} must be at least 1")
    # a dim that tensor parallelism cuts evenly: a vocabulary is padded and always fits
    cut_sizes = {}
    layer_counts = {}
    for key, info in arrays.items():
        if info.cut_dim is not None and not info.ragged:
            cut_sizes[key] = info.shape[info.cut_dim]
        if info.stacked:
            layer_counts[key] = info.model_layers
    if undivided := {key: size for key, size in cut_sizes.items() if size % tp}:
        # the sizes that divide every array are the divisors of their greatest common divisor
        common = gcd(*cut_sizes.values())
        valid = ", ".join(str(divisor) for divisor in range(1, common + 1) if common % divisor == 0)
        raise ValueError(
            f"tp={tp} does not divide {_listed(undivided)}; all arrays can be cut in {valid}"
        )
    if too_short := {key: layers for key, layers in layer_counts.items() if layers < pp}:
        raise ValueError(
            f"pp={pp} stages are more than there are layers in {_listed(too_short)}; "
            f"take at most {min(too_short.values())}"
        )


def _listed(sizes: Mapping[str, int]) -> str:
    shown = [f"{key} ({size})" for key, size in sorted(sizes.items())]
    text = ", ".join(shown[:8])
    if len(shown) > 8:
        text += f" and {len(shown) - 8} more"
    return text


def read_amplification(
    arrays: Iterable[tuple[ArrayInfo, tuple[int, ...]]], tp: int, pp: int
) -> float:
    """Bytes that all ranks together read, divided by the bytes that they need; 1.0 at best.

    arrays: each with the shape of what shares one checksum, which is read as a whole.
    """
    needed = read = 0
    for info, unit_shape in arrays:
        # an array that tensor parallelism does not cut is read by all tensor ranks
        readers = tp if info.cut_dim is None else 1
        # each combination of intervals is one rank's box: their volumes add up to a product of sums
        needed_elements = read_elements = 1
        for intervals, unit in zip(cuts(info, tp, pp), unit_shape, strict=True):
            needed_elements *= _rows(intervals)
            read_elements *= _rows_of_units(intervals, unit)
        needed += info.itemsize * readers * needed_elements
        read += info.itemsize * readers * read_elements
    if needed:
        return read / needed
    return 1.0


def _rows(intervals: Intervals) -> int:
    return sum(stop - start for start, stop in intervals)


def _rows_of_units(intervals: Intervals, unit: int) -> int:
    """How many rows the units of `unit` rows have that touch the intervals; counted once for each interval."""
    rows = 0
    for start, stop in intervals:
        if start < stop:
            rows += (-(-stop // unit) - start // unit) * unit
    return rows
