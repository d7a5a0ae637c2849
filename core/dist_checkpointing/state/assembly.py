"""What a wanted tensor is made of: stored arrays, parts of them, and those one behind the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import index as integer
from typing import Any

from torch import Tensor

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.keys import key_of, path_of
from core.dist_checkpointing.reading.stored import Stored
from core.dist_checkpointing.state.derive import source
from core.dist_checkpointing.state.names import Concat, Form
from core.dist_checkpointing.state.reshaping import Shape, reshaped, straight
from core.parallel_state.flat import Box, intersect, relative, shifted, slices, whole


class Absent(ValueError):
    """The checkpoint has nothing for a key."""


@dataclass(frozen=True)
class Leaf:
    """One stored array, or a part of it. asked: the path that was asked for; found: of the array that it is read
    from. stored: the shape of that; view: what it is taken as; dims: of that, see `index_dims`."""

    asked: str
    found: str
    cast: bool
    stored: Shape
    view: Shape
    dims: tuple[tuple[int, int, bool], ...]

    @property
    def shape(self) -> Shape:
        """The shape of the part that is taken."""
        return tuple(stop - start for start, stop, single in self.dims if not single)

    def targets(self, box: Box, memory: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """(box of the stored array, memory of that extent) that together fill `memory`, a box of the part."""
        cuts = iter(box)
        inside = []
        for start, stop, single in self.dims:
            a, b = (0, stop - start) if single else next(cuts)
            inside.append((start + a, start + b))
        memory = memory[tuple(None if single else slice(None) for _, _, single in self.dims)]
        if self.view == self.stored:
            yield tuple(inside), memory
        else:
            yield from straight(self.stored, self.view, tuple(inside), memory)


@dataclass(frozen=True)
class Assembly:
    """A wanted tensor: each leaf with the box of it that the leaf fills."""

    shape: Shape
    leaves: tuple[tuple[Box, Leaf], ...]

    def differs(self, stored: Stored, info: ArrayInfo) -> str | None:
        """Why it cannot fill `info`; None if it can."""
        if self.shape != info.shape:
            made = "made of what is in the checkpoint" if len(self.leaves) > 1 else "in the checkpoint"
            return f"its shape is {self.shape} {made} and {info.shape} here"
        for _, leaf in self.leaves:
            if why := stored.dtype_differs(leaf.asked, leaf.found, info, cast=leaf.cast):
                return why if len(self.leaves) == 1 else f"{key_of(leaf.asked)}: {why}"
        return None

    def targets(self, box: Box, memory: Tensor) -> Iterator[tuple[str, Box, Tensor]]:
        """(stored array, box of it, memory) that together fill `memory`, a box of the tensor."""
        for held, leaf in self.leaves:
            if (both := intersect(box, held)) is not None:
                for part, target in leaf.targets(relative(both, held), memory[slices(relative(both, box))]):
                    yield leaf.found, part, target


def paths(form: Form) -> list[str]:
    """Of the arrays that a form names."""
    return (
        [path for part in _parts(form) for path in paths(part)] if isinstance(form, Concat) else [path_of(form.key)]
    )


def _parts(form: Concat) -> list[Form]:
    return [part for part in form.sources if not isinstance(part, str)]  # `Names` made Sources of keys


def assemble(form: Form, stored: Stored) -> Assembly:
    """Raises Absent: an array that is not there. ValueError: shapes that do not add up, with both."""
    if isinstance(form, Concat):
        return _concatenated(form, stored)
    path = path_of(form.key)
    if (found := source(path, stored.metadata, stored.derived)) is None:
        raise Absent(f"{form.key} is not in the checkpoint")
    shape = stored.shape(found)
    try:
        view = shape if form.shape is None else reshaped(tuple(form.shape), shape)
        dims = tuple(index_dims(form.index, view))
        if any(start >= stop for start, stop, _ in dims):
            raise ValueError(f"{list(form.index)} takes nothing of {view}")
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"{form.key}: {error}") from None
    leaf = Leaf(path, found, form.cast, shape, view, dims)
    return Assembly(leaf.shape, ((whole(leaf.shape), leaf),))


def _concatenated(form: Concat, stored: Stored) -> Assembly:
    made = [assemble(part, stored) for part in _parts(form)]
    first, leaves, size = made[0].shape, [], 0
    dim = form.dim + len(first) * (form.dim < 0)
    for part in made:
        fit = len(part.shape) == len(first) and 0 <= dim < len(first)
        if not fit or any(n != m for d, (n, m) in enumerate(zip(part.shape, first, strict=True)) if d != dim):
            shapes = ", ".join(f"{_name(one)} {one.shape}" for one in (made[0], part))
            raise ValueError(f"{shapes} cannot be one behind the other along dim {form.dim}; give others, or another")
        offset = [size if d == dim else 0 for d in range(len(first))]
        leaves += [(shifted(box, offset), leaf) for box, leaf in part.leaves]
        size += part.shape[dim]
    return Assembly((*first[:dim], size, *first[dim + 1 :]), tuple(leaves))


def _name(made: Assembly) -> str:
    return key_of(made.leaves[0][1].asked) + ", …" * (len(made.leaves) > 1)


def index_dims(index: tuple[Any, ...], shape: Shape) -> list[tuple[int, int, bool]]:
    """Of each dim: start, stop, whether it falls away. Raises IndexError, TypeError: an index that is none."""
    if (dots := [at for at, part in enumerate(index) if part is Ellipsis]) and len(dots) == 1:
        missing = len(shape) - len(index) + 1
        index = (*index[: dots[0]], *[slice(None)] * missing, *index[dots[0] + 1 :])
    if len(index) > len(shape) or any(part is Ellipsis for part in index):
        raise IndexError(f"{index} has too many parts for a tensor of shape {list(shape)}")
    found = []
    for part, n in zip((*index, *[slice(None)] * (len(shape) - len(index))), shape, strict=True):
        if isinstance(part, slice):
            start, stop, step = part.indices(n)
            if step != 1:
                raise IndexError(f"{part}: only steps of 1 are read; read the range and step through it")
            found.append((start, max(start, stop), False))
            continue
        at = integer(part)
        if not -n <= at < n:
            raise IndexError(f"{at} is out of range for a dim of {n} of shape {list(shape)}")
        found.append((at % n, at % n + 1, True))
    return found
