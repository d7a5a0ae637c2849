"""From a parameter's `Layout` to its place in the checkpoint: arithmetic, no collective."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.state.leaves import SAME
from core.dist_checkpointing.state.tensors import is_dtensor
from core.parallel_state import ParallelState
from core.parallel_state.flat import Box, extent, flat_boxes, intersect, relative, shifted, slices, volume, whole
from core.parallel_state.layout import Layout, layout_of, true_part
from core.parallel_state.modules import Modules, named_buffers, named_parameters, named_stacks

Stacks = Mapping[str, int]  # name of a list of equal layers -> how many there are in the whole model


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """This rank's part of one global tensor: a box of it, in live memory.

    key: the path of the array in the checkpoint. global_shape, global_offset: of the whole, stack axes included.
    data: the part, without the first `prepend_axis_num` dims, each of which it is one row of.
    replica_id: 0 on one holder of each part, as in Megatron; saving does not need it (one of the holders writes).
    tp_dim: the dim that tensor parallelism cuts, which the grid of cells follows.
    stack: of a layer's parameter, the name of the list of layers, for those who want single layers back.
    local: what `load` gives back instead of `data`: the parameter with its padded rows.
    """

    key: str
    data: Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0
    tp_dim: int | None = None
    stack: str = ""
    local: Tensor | None = None

    def __post_init__(self) -> None:
        dims = self.prepend_axis_num + self.data.dim()
        inside = all(a >= 0 and b <= n for (a, b), n in zip(self.box, self.global_shape, strict=False))
        inside |= is_dtensor(self.data)  # which may have padded rows at its end: they cannot be cut off from outside
        if not len(self.global_shape) == len(self.global_offset) == dims or not inside:
            raise ValueError(
                f"{self.key}: a part of shape {list(self.data.shape)} behind {self.prepend_axis_num} stack axes at "
                f"{self.global_offset} does not lie in {self.global_shape}; check offsets and prepend_axis_num"
            )

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: int | tuple[int, ...] = 0,
        prepend_axis_num: int = 0,
    ) -> "ShardedTensor":
        """Megatron's form: (axis, position, parts) of each axis that is cut into equal parts.

        Axes count the prepended ones. Raises ValueError: an axis out of range, a position not below its parts.
        """
        shape = [1] * prepend_axis_num + list(data.shape)
        offset = [0] * len(shape)
        for axis, position, parts in rank_offsets:
            if not (0 <= axis < len(shape) and 0 <= position < parts):
                raise ValueError(
                    f"{key}: offset ({axis}, {position}, {parts}) needs an axis below {len(shape)} and a position "
                    f"below {parts}"
                )
            offset[axis], shape[axis] = position * shape[axis], parts * shape[axis]
        cut = [axis for axis, _, _ in rank_offsets if axis >= prepend_axis_num]
        tp_dim = cut[0] if cut else None
        return cls(key, data, tuple(shape), tuple(offset), replica_id, prepend_axis_num, tp_dim)

    @property
    def box(self) -> Box:
        """Where the part lies in the whole."""
        shape = (1,) * self.prepend_axis_num + tuple(self.data.shape)
        return tuple((o, o + n) for o, n in zip(self.global_offset, shape, strict=True))

    @property
    def piece(self) -> "Piece":
        """What the exchange and the engine see of it."""
        return Piece(self.key, self.box, self.part)

    @property
    def part(self) -> Tensor:
        """`data` with its stack axes, without gradient: exactly the shape of `box`."""
        return self.data.detach()[(None,) * self.prepend_axis_num]

    @property
    def info(self) -> ArrayInfo:
        """What the whole array is.

        Rows that tensor parallelism cuts, outside of stacks, are a vocabulary: whether a layout pads it or not, its
        grid is that of one which is padded.
        """
        dtype = str(self.data.dtype).removeprefix("torch.")
        stacked = self.prepend_axis_num > 0
        ragged = not stacked and self.tp_dim == 0
        return ArrayInfo(self.global_shape, dtype, self.tp_dim, stacked, ragged, self.stack)


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of an array in live memory: `data` has exactly its extent."""

    key: str
    box: Box
    data: Tensor


@dataclass(frozen=True)
class ShardedObject:
    """A small value (step, schedule, position in the data), the same on every rank that has it."""

    key: str
    data: Any


class StatePart(Protocol):
    """A part of an optimizer's state, as `optimizer.states()` gives it.

    tensor: the true part of the local tensor; with `interval`, 1-D: the elements [start, stop) of the local tensor's
    flat form as it lies in memory, padded rows included.
    """

    @property
    def tensor(self) -> Tensor:
        """The live memory of this part of a state."""
        ...

    @property
    def layout(self) -> Layout:
        """The layout of the whole parameter."""
        ...

    @property
    def interval(self) -> tuple[int, int] | None:
        """Which elements, if not all."""
        ...


def stacked_key(name: str, stacks: Stacks) -> tuple[str, int | None, str]:
    """`decoder.layers.7.x` -> (`decoder.layers.x`, 7, `decoder.layers`) where the last is a stack."""
    for stack in stacks:
        if found := re.match(re.escape(stack) + r"\.(\d+)\.", name):
            return f"{stack}.{name[found.end() :]}", int(found[1]), stack
    return name, None, ""


def refuse_freed(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor whose memory is given back, as ZeRO-3 does between uses."""
    if (there := tensor.untyped_storage().nbytes()) < tensor.numel() * tensor.itemsize:
        raise ValueError(
            f"{name} has {there} bytes of memory for {tensor.numel() * tensor.itemsize}: it is sharded (ZeRO-3); "
            "take the model's state from core.optimizer.sharded_state_dict(shard), shard being its DataParallel"
        )


class Mapper:
    """Makes sharded tensors of one rank: where it stands, and which lists of layers are stacks."""

    def __init__(self, ps: ParallelState, stacks: Stacks) -> None:
        self._at, self._sizes, self._stacks = ps.coordinate, ps.sizes, stacks

    def parameter(self, group: str, name: str, tensor: Tensor, layout: Layout) -> ShardedTensor:
        """The true part of a local tensor that lies as `layout` says.

        Raises ValueError: a tensor whose memory is given back, as ZeRO-3 does between uses.
        """
        refuse_freed(name, tensor)
        part = tensor.detach()
        if not is_dtensor(part):
            part = true_part(part, layout, self._at, self._sizes)
        box: Box = tuple((s.start, s.stop) for s in layout.box(self._at, self._sizes))
        return self._place(group, name, layout, part, box, tensor.detach())

    def interval(
        self, group: str, name: str, flat: Tensor, layout: Layout, interval: tuple[int, int]
    ) -> list[ShardedTensor]:
        """The true elements of an interval of the local tensor's flat form: a box for each straight piece."""
        shape = layout.local_shape(self._sizes)
        start = [s.start for s in layout.box(self._at, self._sizes)]
        held = layout.box(self._at, self._sizes)
        true = whole(s.stop - s.start for s in held)
        made, at = [], 0
        for box in flat_boxes(shape, *interval):
            piece = flat[at : at + volume(box)].view(extent(box))
            at += volume(box)
            if (kept := intersect(box, true)) is not None:
                part = piece[slices(relative(kept, box))]
                made.append(self._place(group, name, layout, part, shifted(kept, start), None))
        return made

    def _place(
        self, group: str, name: str, layout: Layout, part: Tensor, box: Box, local: Tensor | None
    ) -> ShardedTensor:
        key, row, stack = stacked_key(name, self._stacks)
        layers = () if row is None else (self._stacks[stack],)
        axes = len(layers)
        tp_dim = layout.split.get("tp", next(iter(layout.split.values()), None))
        return ShardedTensor(
            key=f"{group}/{key}",
            data=part,
            global_shape=layers + layout.shape,
            global_offset=(row or 0,) * axes + tuple(a for a, _ in box),
            replica_id=0 if layout.owned_by(self._at) else 1,
            prepend_axis_num=axes,
            tp_dim=None if tp_dim is None else tp_dim + axes,
            stack=stack,
            local=local,
        )


def sharded_state_dict(modules: Modules, ps: ParallelState, *, prefix: str = "") -> dict[str, ShardedTensor]:
    """name -> this rank's part of every parameter and persistent buffer of a module, or of a pipeline's stages.

    Keys are `model/<prefix><name>`. A parameter lies as its `Layout` says; one without a layout, and every buffer,
    is the same on all ranks. A parameter shared by several names is there once.
    """
    mapper = Mapper(ps, {prefix + name: layers for name, layers in named_stacks(modules).items()})
    made = {
        prefix + name: mapper.parameter("model", prefix + name, p, layout_of(p))
        for name, p in named_parameters(modules)
    }
    for name, buffer in named_buffers(modules):
        made[prefix + name] = mapper.parameter("model", prefix + name, buffer, Layout(tuple(buffer.shape)))
    return made


def sharded_states(
    states: Mapping[str, Mapping[str, StatePart]], ps: ParallelState, *, stacks: Stacks, group: str = "optimizer"
) -> dict[str, dict[str, ShardedTensor | list[ShardedTensor]]]:
    """name -> kind -> this rank's part of an optimizer's states, under `optimizer/<kind>/<name>`.

    An interval of padded rows only is left out: there is nothing of it in the whole.
    """
    mapper = Mapper(ps, stacks)

    def one(name: str, kind: str, part: StatePart) -> ShardedTensor | list[ShardedTensor]:
        if part.interval is not None:
            return mapper.interval(f"{group}/{kind}", name, part.tensor, part.layout, part.interval)
        box: Box = tuple((s.start, s.stop) for s in part.layout.box(ps.coordinate, ps.sizes))
        return mapper._place(f"{group}/{kind}", name, part.layout, part.tensor, box, None)

    found = {name: {kind: one(name, kind, part) for kind, part in kinds.items()} for name, kinds in states.items()}
    return {name: {kind: part for kind, part in kinds.items() if part != []} for name, kinds in found.items()}


def map_leaves(state: Any, change: Callable[[tuple[str, ...], Any], Any], path: tuple[str, ...] = ()) -> Any:
    """A nested state with every leaf changed: mappings, and lists and tuples that hold tensors somewhere, are walked
    through, an item's name being its position; other lists and tuples are leaves.

    Raises ValueError: names that are no text or number, two that are written alike.
    """
    if isinstance(state, Mapping):
        _check_names(path, state)
        return {name: map_leaves(value, change, (*path, str(name))) for name, value in state.items()}
    if isinstance(state, (list, tuple)) and _holds_tensors(state):
        items = [map_leaves(value, change, (*path, str(number))) for number, value in enumerate(state)]
        if isinstance(state, list):
            return items
        return type(state)(*items) if hasattr(state, "_fields") else tuple(items)
    return change(path, state)


def _check_names(path: tuple[str, ...], state: Mapping[Any, Any]) -> None:
    first: dict[str, Any] = {}
    for name in state:
        if not (name is None or isinstance(name, (str, int, float))):
            raise ValueError(
                f"{'/'.join(path) or 'the state'}: the key {name!r} is a {type(name).__name__}; use texts or numbers"
            )
        if first.setdefault(str(name), name) is not name:
            raise ValueError(
                f"{'/'.join(path) or 'the state'}: the keys {first[str(name)]!r} and {name!r} are written alike in "
                "a checkpoint; rename one of them"
            )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return not set(map(type, value)) <= {*SAME, float} and any(map(_holds_tensors, value))
    return isinstance(value, (Tensor, np.ndarray, ShardedTensor, ShardedObject)) or hasattr(value, "param_groups")
