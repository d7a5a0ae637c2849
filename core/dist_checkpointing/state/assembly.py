"""What a requested tensor is assembled from: stored arrays, parts of them, and several one behind the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import index as integer
from typing import Any

from torch import Tensor

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.keys import key_of, path_of
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.state.derive import stored_source
from core.dist_checkpointing.state.names import Concat, TensorSource
from core.dist_checkpointing.state.reshaping import Shape, resolved_shape, straight_boxes
from core.parallel_state.flat import Box, intersect, relative, shifted, slices, whole


class MissingArray(ValueError):
    """The checkpoint has nothing for a key."""


@dataclass(frozen=True)
class Leaf:
    """One stored array, or a part of it.

    requested: the path that was asked for; stored: of the array that it is read from; stored_shape: of that.
    view: the shape that it is taken as; dims: the part of that, see `index_dims`.
    """

    requested: str
    stored: str
    cast: bool
    stored_shape: Shape
    view: Shape
    dims: tuple[tuple[int, int, bool], ...]

    @property
    def shape(self) -> Shape:
        """The shape of the part that is taken."""
        return tuple(stop - start for start, stop, single in self.dims if not single)

    @property
    def is_complete(self) -> bool:
        """Whether it is the stored array as it is."""
        dims = tuple((0, size, False) for size in self.stored_shape)
        return self.view == self.stored_shape and self.dims == dims

    def targets(self, box: Box, memory: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """(box of the stored array, memory of that extent) that together fill `memory`, a box of the part."""
        # dims that an integer index removed come back with one element
        intervals = iter(box)
        view_box = []
        for start, stop, single in self.dims:
            first, end = (0, stop - start) if single else next(intervals)
            view_box.append((start + first, start + end))
        memory = memory[tuple(None if single else slice(None) for _, _, single in self.dims)]
        if self.view == self.stored_shape:
            yield tuple(view_box), memory
        else:
            yield from straight_boxes(self.stored_shape, self.view, tuple(view_box), memory)


@dataclass(frozen=True)
class Assembly:
    """A requested tensor: its shape, and each leaf with the box of it that the leaf fills."""

    shape: Shape
    leaves: tuple[tuple[Box, Leaf], ...]

    def differs(self, stored: StoredCheckpoint, info: ArrayInfo) -> str | None:
        """Why it cannot fill `info`; None if it can."""
        if self.shape != info.shape:
            if len(self.leaves) > 1:
                origin = "made of what is in the checkpoint"
            else:
                origin = "in the checkpoint"
            return f"its shape is {self.shape} {origin} and {info.shape} here"
        for _, leaf in self.leaves:
            layers = stored.info(leaf.stored).layers
            if len(self.leaves) == 1 and leaf.is_complete and layers != info.layers:
                return f"it is of the layers {_listed(layers)} in the checkpoint and {_listed(info.layers)} here"
            if reason := stored.dtype_differs(leaf.requested, leaf.stored, info, cast=leaf.cast):
                if len(self.leaves) == 1:
                    return reason
                return f"{key_of(leaf.requested)}: {reason}"
        return None

    def targets(self, box: Box, memory: Tensor) -> Iterator[tuple[str, Box, Tensor]]:
        """(stored array, box of it, memory) that together fill `memory`, a box of the tensor."""
        for leaf_box, leaf in self.leaves:
            overlap = intersect(box, leaf_box)
            if overlap is None:
                continue
            overlap_memory = memory[slices(relative(overlap, box))]
            for stored_box, target in leaf.targets(relative(overlap, leaf_box), overlap_memory):
                yield leaf.stored, stored_box, target


def _listed(layers: tuple[int, ...]) -> str:
    if layers:
        return ", ".join(map(str, layers))
    return "0 and on, all of them,"


def paths(source: TensorSource) -> list[str]:
    """The paths of the arrays that a source names."""
    if not isinstance(source, Concat):
        return [path_of(source.key)]
    all_paths = []
    for inner in _sources(source):
        all_paths += paths(inner)
    return all_paths


def _sources(concat: Concat) -> list[TensorSource]:
    # `KeyMapping` left no plain keys
    return [source for source in concat.sources if not isinstance(source, str)]


def assemble(source: TensorSource, stored: StoredCheckpoint) -> Assembly:
    """Raises MissingArray: an array that is not there. ValueError: shapes that do not add up, with both."""
    if isinstance(source, Concat):
        return _concatenated(source, stored)
    path = path_of(source.key)
    stored_path = stored_source(path, stored.metadata, stored.derived)
    if stored_path is None:
        raise MissingArray(f"{source.key} is not in the checkpoint")
    shape = stored.shape(stored_path)
    try:
        if source.shape is None:
            view = shape
        else:
            view = resolved_shape(tuple(source.shape), shape)
        dims = tuple(index_dims(source.index, view))
        if any(start >= stop for start, stop, _ in dims):
            raise ValueError(f"{list(source.index)} takes nothing of {view}")
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"{source.key}: {error}") from None
    leaf = Leaf(path, stored_path, source.cast, shape, view, dims)
    return Assembly(leaf.shape, ((whole(leaf.shape), leaf),))


def _concatenated(concat: Concat, stored: StoredCheckpoint) -> Assembly:
    assemblies = [assemble(source, stored) for source in _sources(concat)]
    first_shape = assemblies[0].shape
    dim = concat.dim + len(first_shape) if concat.dim < 0 else concat.dim
    # each assembly's leaves move behind those before it
    leaves: list[tuple[Box, Leaf]] = []
    size = 0  # along `dim`, so far
    for assembly in assemblies:
        if not _fits(assembly.shape, first_shape, dim):
            shapes = f"{_name(assemblies[0])} {first_shape}, {_name(assembly)} {assembly.shape}"
            raise ValueError(
                f"{shapes} cannot be one behind the other along dim {concat.dim}; give others, or another"
            )
        offset = [0] * len(first_shape)
        offset[dim] = size
        leaves += [(shifted(box, offset), leaf) for box, leaf in assembly.leaves]
        size += assembly.shape[dim]
    return Assembly((*first_shape[:dim], size, *first_shape[dim + 1 :]), tuple(leaves))


def _fits(shape: Shape, first_shape: Shape, dim: int) -> bool:
    """Whether two shapes are the same but for `dim`."""
    if len(shape) != len(first_shape) or not 0 <= dim < len(first_shape):
        return False
    return shape[:dim] == first_shape[:dim] and shape[dim + 1 :] == first_shape[dim + 1 :]


def _name(assembly: Assembly) -> str:
    first_key = key_of(assembly.leaves[0][1].requested)
    if len(assembly.leaves) > 1:
        return first_key + ", …"
    return first_key


def index_dims(index: tuple[Any, ...], shape: Shape) -> list[tuple[int, int, bool]]:
    """Of each dim: start, stop, whether it falls away. Raises IndexError, TypeError: an index that is none."""
    # `...` stands for as many full slices as are missing
    dots = [number for number, item in enumerate(index) if item is Ellipsis]
    if len(dots) == 1:
        missing = len(shape) - len(index) + 1
        index = (*index[: dots[0]], *[slice(None)] * missing, *index[dots[0] + 1 :])
    if len(index) > len(shape) or any(item is Ellipsis for item in index):
        raise IndexError(f"{index} has too many parts for a tensor of shape {list(shape)}")
    dims = []
    full_index = (*index, *[slice(None)] * (len(shape) - len(index)))
    for item, size in zip(full_index, shape, strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step != 1:
                raise IndexError(
                    f"{item}: only steps of 1 are read; read the range and step through it"
                )
            dims.append((start, max(start, stop), False))
            continue
        position = integer(item)
        if not -size <= position < size:
            raise IndexError(
                f"{position} is out of range for a dim of {size} of shape {list(shape)}"
            )
        # -1 is the last
        dims.append((position % size, position % size + 1, True))
    return dims
