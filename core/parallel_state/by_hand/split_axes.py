"""Which dims of an activation are split over ranks, through views, cuts and sums: functions of integers.

Axes are a tensor's dims, each a tuple of atoms (size, is split), outermost first: q, k, v of a rank in one flat dim
are ((3, False), (heads/tp, True), (d, False)). A rank's part of a split atom is a contiguous block of the whole.
"""

from collections.abc import Collection, Sequence
from itertools import chain, pairwise
from math import prod

Atom = tuple[int, bool]
Axes = tuple[tuple[Atom, ...], ...]


def _joined(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    """Without plain atoms of size 1, plain neighbours as one."""
    result: list[Atom] = []
    for size, is_split in atoms:
        if size == 1 and not is_split:
            continue
        if result and not is_split and not result[-1][1]:
            result[-1] = (result[-1][0] * size, False)
        else:
            result.append((size, is_split))
    return tuple(result)


def axes_of_columns(shape: Sequence[int], sizes: Sequence[int], split_dim: int) -> Axes:
    """Of a column linear's output of `shape`, whose last dim is `sizes` flattened, of which one is split."""
    columns = [(size, dim == split_dim) for dim, size in enumerate(sizes)]
    return (*plain(shape[:-1]), _joined(columns))


def plain(shape: Sequence[int]) -> Axes:
    """Of a tensor that is the same on every rank."""
    return tuple(_joined([(size, False)]) for size in shape)


def of_dims(shape: Sequence[int], split_dims: Collection[int]) -> Axes:
    """Of this rank's part of a weight, which is split along `split_dims`."""
    return tuple(
        ((size, True),) if dim in split_dims else _joined([(size, False)])
        for dim, size in enumerate(shape)
    )


def is_split(axes: Axes, dims: Sequence[int] | None = None) -> bool:
    """Whether one of `dims` (default: any) is split."""
    if dims is None:
        chosen = list(range(len(axes)))
    else:
        chosen = [dim % len(axes) for dim in dims if -len(axes) <= dim < len(axes)]
    return any(split for dim in chosen for _, split in axes[dim])


def split_dims(axes: Axes) -> list[int]:
    """The dims that are split, or hold what is split among others after a view."""
    return [dim for dim, atoms in enumerate(axes) if any(split for _, split in atoms)]


def reshaped(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Of a view of `shape`; None where a dim of it ends within another's parts."""
    # all atoms, innermost first, so that `pop` gives the outermost that is left
    remaining = list(chain.from_iterable(axes))[::-1]
    result = []
    for size in shape:
        taken: list[Atom] = []
        while size > 1 or (size == 1 and remaining and remaining[-1][0] == 1 and not taken):
            if not remaining:
                return None
            n, split = remaining.pop()
            if size % n == 0:
                taken.append((n, split))
                size //= n
                if size == 1:
                    break
            elif n % size == 0:
                # the outer factor of a rank's block is split, what is inside it whole
                taken.append((size, split))
                remaining.append((n // size, False))
                size = 1
            else:
                return None
        result.append(_joined(taken))
    if any(split for _, split in remaining) or _is_ambiguous(axes, shape, result):
        return None
    return tuple(result)


def _is_ambiguous(axes: Axes, shape: Sequence[int], result: Sequence[tuple[Atom, ...]]) -> bool:
    """Whether a new dim of size 1 may be this rank's only head: the split one instead of that after it."""
    is_longer = sum(size == 1 for size in shape) > sum(not atoms for atoms in axes)
    if not is_longer:
        return False
    for atoms, after in pairwise(result):
        begins_split = bool(after) and after[0][1]
        if not atoms and begins_split:
            return True
    return False


def cut(axes: Axes, dim: int, start: int, stop: int) -> Axes | None:
    """Of [start, stop) of a dim; None where that cuts a split atom: other ranks' block has other columns there."""
    atoms = axes[dim]
    first = next((place for place, (_, split) in enumerate(atoms) if split), None)
    size = prod(n for n, _ in atoms)
    if first is None:
        return (*axes[:dim], _joined([(stop - start, False)]), *axes[dim + 1 :])
    if (start, stop) == (0, size):
        return axes
    # whole blocks of what is split may be cut off, as q from q, k, v
    inner = prod(n for n, _ in atoms[first:])
    if start % inner or stop % inner:
        return None
    kept = _joined([((stop - start) // inner, False), *atoms[first:]])
    return (*axes[:dim], kept, *axes[dim + 1 :])


def without(axes: Axes, dims: Sequence[int], *, keepdim: bool = False) -> Axes:
    """Of a sum over `dims`."""
    gone = {dim % len(axes) for dim in dims}
    if keepdim:
        return tuple(() if dim in gone else atoms for dim, atoms in enumerate(axes))
    return tuple(atoms for dim, atoms in enumerate(axes) if dim not in gone)


def broadcast(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Of an elementwise result of `shape`; None where a split dim is not there as it was."""
    missing = len(shape) - len(axes)
    if missing < 0:
        return None
    result = list(plain(shape))
    for dim, atoms in enumerate(axes):
        size = prod(n for n, _ in atoms)
        if any(split for _, split in atoms):
            if size != shape[missing + dim]:
                return None
            result[missing + dim] = atoms
    return tuple(result)


def are_crossed(inputs: Sequence[Axes], dims: int) -> bool:
    """Whether an elementwise result of `dims` dims pairs a split dim with another: `x[:, :, None] - x[:, None]`."""
    places = [{dim - len(axes) + dims for dim in split_dims(axes)} for axes in inputs]
    return len(set().union(*places)) > max(map(len, places))


def are_blocks(axes: Axes) -> bool:
    """Whether the last dim is one block of the whole's: a row linear's weight is split so."""
    return not axes[-1] or not is_split(axes, [-1]) or axes[-1][0][1]
