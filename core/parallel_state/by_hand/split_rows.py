"""Pieces of split rows, and where in a rank's rows each begins: chunks of tokens are right, neighbours are not.

A program that saves memory goes through tokens in chunks (`torch.cat([f(c) for c in y.chunk(4)])`), which is right on
any rank's rows. `y[1:] - y[:-1]` meets tokens that other ranks hold. So a piece's first row is kept with it.
"""

from collections.abc import Collection
from itertools import pairwise
from typing import Any

from torch import Tensor

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_tensor import SplitTensor

_CHUNKS = ("chunk", "split", "tensor_split", "split_with_sizes")
_JOINS = ("cat", "concat", "concatenate")
ACROSS = "across"
# pieces, their axes and first rows
Pieces = list[tuple[Tensor, Axes, int]]


def first_row(x: Any) -> int:
    """Of the module's rows, where `x` begins."""
    first: int = getattr(x, "first_row", 0)
    return first


class SlicedRows:
    """Slices that a program took of rows by number in one forward of a module that is given one of `lengths` rows."""

    def __init__(self, lengths: Collection[int] = ()) -> None:
        self._lengths = lengths
        self._taken: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        # kept: an id must stay that tensor's
        self._tensors: list[Tensor] = []

    def add(self, x: Tensor, n: int, start: int, stop: int) -> None:
        """Rows [start, stop) of the n of x."""
        # what was padded is cut off again
        if first_row(x) + start == 0 and n not in self._lengths and stop - start in self._lengths:
            return
        self._tensors.append(x)
        self._taken.setdefault(id(x), (n, []))[1].append((start, stop))

    def are_chunks(self) -> bool:
        """Whether the slices of each tensor are three or more equal chunks of all its rows, the last maybe less."""
        return all(_tile(n, sorted(set(parts))) for n, parts in self._taken.values())


def _tile(n: int, parts: list[tuple[int, int]]) -> bool:
    sizes = [stop - start for start, stop in parts]
    follows = all(before[1] == after[0] for before, after in pairwise(parts))
    is_all = parts[0][0] == 0 and parts[-1][1] == n
    return follows and is_all and len(parts) > 2 and set(sizes[:-1]) == {max(sizes)}


def pieces_of(
    name: str, args: tuple, kwargs: dict[str, Any], result: Any, slices: SlicedRows
) -> Pieces | str | None:
    """What `name` made of rows, if it cuts, pads or joins them; ACROSS; None: another function."""
    if name in _CHUNKS:
        return _chunks(args, kwargs, result)
    if name == "getitem":
        return _sliced(args, result, slices)
    if name == "pad":
        return _padded(args, kwargs, result)
    if name in _JOINS:
        return _joined(args, kwargs, result)
    return None


def _with_rows(axes: Axes, dim: int, n: int) -> Axes:
    return (*axes[:dim], ((n, True),), *axes[dim + 1 :])


def _are_rows(axes: Axes, dim: int) -> bool:
    return len(axes[dim]) == 1 and axes[dim][0][1]


def _chunks(args: tuple, kwargs: dict[str, Any], result: Any) -> Pieces | None:
    x = args[0]
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % x.dim()
    if not isinstance(x, SplitTensor) or not _are_rows(x.axes, dim):
        return None
    pieces: Pieces = []
    start = first_row(x)
    for piece in result:
        pieces.append((piece, _with_rows(x.axes, dim, piece.shape[dim]), start))
        start += piece.shape[dim]
    return pieces


def _sliced(args: tuple, result: Any, slices: SlicedRows) -> Pieces | None:
    x, index = args
    index = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, SplitTensor) or not all(
        isinstance(i, (int, slice)) and not isinstance(i, bool) for i in index
    ):
        return None
    numbers = [dim for dim, i in enumerate(index) if isinstance(i, int)]
    rows = [dim for dim in range(len(index)) if _are_rows(x.axes, dim)]
    if len(rows) != 1 or rows[0] in numbers or numbers:
        return None
    dim = rows[0]
    n = x.shape[dim]
    start, stop, step = index[dim].indices(n)
    if step != 1 or (start, stop) == (0, n):
        return None
    slices.add(x, n, start, stop)
    axes = list(x.axes)
    for place, part in enumerate(index):
        if place != dim and part != slice(None):
            axes[place] = split_axes.plain([result.shape[place]])[0]
    return [(result, _with_rows(tuple(axes), dim, stop - start), first_row(x) + start)]


def _padded(args: tuple, kwargs: dict[str, Any], result: Any) -> Pieces | None:
    x = args[0] if args else kwargs["input"]
    pad = kwargs.get("pad", args[1] if len(args) > 1 else ())
    if not isinstance(x, SplitTensor):
        return None
    axes, first = x.axes, first_row(x)
    for place in range(len(pad) // 2):
        before, after = pad[2 * place : 2 * place + 2]
        dim = x.dim() - 1 - place
        if before == after == 0:
            continue
        if _are_rows(axes, dim):
            first -= before
            axes = _with_rows(axes, dim, result.shape[dim])
        elif not split_axes.is_split(axes, [dim]):
            axes = (*axes[:dim], *split_axes.plain([result.shape[dim]]), *axes[dim + 1 :])
        else:
            return None
    return [(result, axes, first)]


def _joined(args: tuple, kwargs: dict[str, Any], result: Any) -> Pieces | str | None:
    parts = args[0] if args else kwargs.get("tensors", ())
    x = next(part for part in parts if isinstance(part, SplitTensor))
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % x.dim()
    if not _are_rows(x.axes, dim):
        return None
    begins = set()
    place = 0
    for part in parts:
        if isinstance(part, SplitTensor) and _are_rows(part.axes, dim):
            begins.add(first_row(part) - place)
        place += part.shape[dim]
    if len(begins) > 1:
        return ACROSS
    return [(result, _with_rows(x.axes, dim, place), begins.pop())]
