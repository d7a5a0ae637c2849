"""Windows and steps over what is split: right where every one of them lies inside of a rank's columns."""

from math import prod
from typing import Any

from torch import Tensor

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_axes import Atom, Axes

_POOLS = {"max_pool1d": 1, "avg_pool1d": 1, "lp_pool1d": 2}  # name -> place of the window's size


def windowed(
    name: str, args: tuple, kwargs: dict[str, Any], axes: Axes, result: Any
) -> Axes | None:
    """Axes of windows that lie beside each other, as those of maxout; None: one may need other ranks' columns."""
    stated = [*args[1:], *kwargs.values()]
    dim, size, step = -1, 0, 0
    if name == "unfold" and len(stated) == 3 and all(isinstance(n, int) for n in stated):
        dim, size, step = stated
    elif name in _POOLS:
        place = _POOLS[name]
        size = _number(kwargs.get("kernel_size", args[place] if len(args) > place else 0))
        step = _number(kwargs.get("stride", args[place + 1] if len(args) > place + 1 else 0))
        padding = kwargs.get("padding", args[3] if place == 1 and len(args) > 3 else 0)
        if _number(padding) or _number(kwargs.get("dilation", 1)) != 1:
            return None
        step = step or size
    if not size or not isinstance(result, Tensor):
        return None
    dim %= len(axes)
    atoms: tuple[Atom, ...]
    if split_axes.is_split(axes, [dim]):
        inner, is_split = axes[dim][-1]
        if size != step or inner % size:
            return None
        atoms = (*axes[dim][:-1], (inner // size, is_split))
    else:
        (atoms,) = split_axes.plain([result.shape[dim]])
    found = (*axes[:dim], atoms, *axes[dim + 1 :])
    if name == "unfold":
        return (*found, *split_axes.plain([size]))
    return found


def _number(stated: Any) -> int:
    """Of an int, or a tuple of one; 0 of nothing."""
    if isinstance(stated, (tuple, list)):
        stated = stated[0] if stated else 0
    return stated or 0


def strided(axes: Axes, dim: int, part: slice, size: int) -> tuple[Atom, ...] | str | None:
    """Atoms of every step-th column; "across" where ranks would take others; None: not followed."""
    atoms = axes[dim]
    start, stop, step = part.indices(size)
    last = max(place for place, (_, is_split) in enumerate(atoms) if is_split)
    # elements that lie together inside one split column, such as a head's
    inner = prod(n for n, _ in atoms[last + 1 :])
    if inner % abs(step) == 0 and inner > 1:
        return None
    columns = atoms[last][0]
    begins_alike = last == len(atoms) - 1 and 0 <= start < step and columns % step == 0
    if begins_alike and stop > size - step + start:
        return (*atoms[:-1], (columns // step, True))
    return "across"
