"""What the ranks of TP x PP hold of an array, and what reading it costs: arithmetic."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import gcd, prod

from core.dist_checkpointing.format.arrays import ArrayInfo, Arrays
from core.dist_checkpointing.format.grid import round_up

Intervals = list[tuple[int, int]]


def cuts(info: ArrayInfo, tp: int, pp: int) -> list[Intervals]:
    """dim -> the intervals that ranks hold of it, in the order of tensor ranks or of pipeline stages.

    A vocabulary is cut as it is padded in memory, of which only true rows are here: the last may be empty.
    """
    found = [[(0, n)] for n in info.shape]
    if info.stacked:
        found[0] = _even(info.shape[0], pp)
    if info.tp_dim is not None:
        n = info.shape[info.tp_dim]
        found[info.tp_dim] = _padded(n, tp) if info.ragged else _even(n, tp)
    return found


def _even(n: int, parts: int) -> Intervals:
    return list(pairwise(n * part // parts for part in range(parts + 1)))


def _padded(n: int, tp: int) -> Intervals:
    parts = 8 if 8 % tp == 0 else tp
    rows = round_up(-(-n // parts)) * parts // tp
    return [(min(rank * rows, n), min(rank * rows + rows, n)) for rank in range(tp)]


def check_layout(arrays: Arrays, tp: int, pp: int) -> None:
    """Raises ValueError naming the arrays that cannot be cut so, and the numbers that can."""
    if tp < 1 or pp < 1:
        raise ValueError(f"tp={tp} and pp={pp} must be at least 1")
    cut = {
        key: info.shape[info.tp_dim] for key, info in arrays.items() if info.tp_dim is not None and not info.ragged
    }
    if bad := {key: n for key, n in cut.items() if n % tp}:
        common = gcd(*cut.values())
        valid = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ValueError(f"tp={tp} does not divide {_named(bad)}; all arrays can be cut in {valid}")
    layers = {key: info.shape[0] for key, info in arrays.items() if info.stacked}
    if bad := {key: n for key, n in layers.items() if n < pp}:
        raise ValueError(
            f"pp={pp} stages are more than there are layers in {_named(bad)}; take at most {min(bad.values())}"
        )


def _named(sizes: Mapping[str, int]) -> str:
    shown = [f"{key} ({n})" for key, n in sorted(sizes.items())]
    return ", ".join(shown[:8]) + f" and {len(shown) - 8} more" * (len(shown) > 8)


def read_amplification(arrays: Iterable[tuple[ArrayInfo, tuple[int, ...]]], tp: int, pp: int) -> float:
    """Bytes that the ranks read over bytes that they need, all together.

    arrays: each with the shape of what shares one checksum, which is read as a whole.
    """
    needed = read = 0
    for info, unit in arrays:
        weight = info.itemsize * (tp if info.tp_dim is None else 1)
        dims = cuts(info, tp, pp)
        needed += weight * prod(sum(stop - start for start, stop in dim) for dim in dims)
        read += weight * prod(_touched(dim, n) for dim, n in zip(dims, unit, strict=True))
    return read / needed if needed else 1.0


def _touched(dim: Intervals, unit: int) -> int:
    """How many rows of whole units cover each interval."""
    return sum((-(-stop // unit) - start // unit) * unit for start, stop in dim if start < stop)
