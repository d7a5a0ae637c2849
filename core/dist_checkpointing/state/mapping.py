"""From a parameter's `Layout` to where its shards lie in the checkpoint's arrays: arithmetic, no collective."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.state.left_out import tell_of_own_states
from core.dist_checkpointing.state.tensors import is_dtensor
from core.parallel_state import ParallelState
from core.parallel_state.flat import (
    Box,
    extent,
    flat_boxes,
    intersect,
    relative,
    shifted,
    slices,
    volume,
    whole,
)
from core.parallel_state.layout import Layout, layout_of, true_part
from core.parallel_state.modules import (
    Modules,
    Stack,
    named_buffers,
    named_parameters,
    named_stacks,
)

# name of a list of layers -> what the full model has of them
Stacks = Mapping[str, int | Stack]


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """This rank's shard of one global tensor: a box of it, in live memory.

    key: the path of the array in the checkpoint. global_shape, global_offset: of the full array, stack axes included.
    data: the shard, without the first `prepend_axis_num` dims, each of which it is one row of.
    replica_id: 0 on one holder of each shard, as in Megatron; saving does not need it (one of the holders writes).
    tp_dim: the dim that tensor parallelism cuts (or `axis`: that of experts), which the grid of cells follows.
    stack: of a layer's parameter, the name of the list of layers, for those who want single layers back. layers: the
    numbers of those that have it, where only some of the model's `depth` do.
    local: what `load` gives back instead of `data`: the parameter with its padded rows. from_first: of ranks with the
    same box the first one's values count, as of running statistics; else `save` refuses other values of one box.
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
    layers: tuple[int, ...] = ()
    depth: int = 0
    axis: str = "tp"
    from_first: bool = False

    def __post_init__(self) -> None:
        dims = self.prepend_axis_num + self.data.dim()
        inside = True
        # a DTensor may have padded rows at its end, which cannot be cut off from outside
        if not is_dtensor(self.data):
            intervals = zip(self.box, self.global_shape, strict=False)
            inside = all(start >= 0 and stop <= size for (start, stop), size in intervals)
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
        """Megatron's form: (axis, position, count) of each axis that is cut into `count` equal shards.

        Axes count the prepended ones. Raises ValueError: an axis out of range, a position not below its count.
        """
        shape = [1] * prepend_axis_num + list(data.shape)
        offset = [0] * len(shape)
        tp_dim = None
        for axis, position, count in rank_offsets:
            if not (0 <= axis < len(shape) and 0 <= position < count):
                raise ValueError(
                    f"{key}: offset ({axis}, {position}, {count}) needs an axis below {len(shape)} and a position "
                    f"below {count}"
                )
            # of `count` equal shards, so the global size is a multiple of the local one
            offset[axis] = position * shape[axis]
            shape[axis] *= count
            if tp_dim is None and axis >= prepend_axis_num:
                tp_dim = axis
        return cls(key, data, tuple(shape), tuple(offset), replica_id, prepend_axis_num, tp_dim)

    @property
    def box(self) -> Box:
        """Where the shard lies in the full array."""
        shape = (1,) * self.prepend_axis_num + tuple(self.data.shape)
        return tuple(
            (start, start + size) for start, size in zip(self.global_offset, shape, strict=True)
        )

    @property
    def shard(self) -> "Shard":
        """What the exchange and the readers see of it."""
        return Shard(self.key, self.box, self.stacked_data)

    @property
    def stacked_data(self) -> Tensor:
        """`data` with its stack axes, without gradient: exactly the shape of `box`."""
        return self.data.detach()[(None,) * self.prepend_axis_num]

    @property
    def info(self) -> ArrayInfo:
        """What the full array is.

        Rows that tensor parallelism cuts, outside of stacks, are a vocabulary: whether a layout pads it or not, its
        grid is that of one which is padded.
        """
        dtype = str(self.data.dtype).removeprefix("torch.")
        stacked = self.prepend_axis_num > 0
        ragged = not stacked and self.tp_dim == 0 and self.axis == "tp"
        shape, layers = self.global_shape, self.layers
        return ArrayInfo(
            shape, dtype, self.tp_dim, stacked, ragged, self.stack, layers, self.depth, self.axis
        )


@dataclass(frozen=True, eq=False)
class Shard:
    """A box of an array in live memory: `data` has exactly its extent."""

    key: str
    box: Box
    data: Tensor


@dataclass(frozen=True)
class ShardedObject:
    """A small value (step, schedule, position in the data), the same on every rank that has it."""

    key: str
    data: Any


class StateShard(Protocol):
    """A shard of an optimizer's state, as `optimizer.states()` gives it.

    tensor: the true part of the local tensor, without padding; with `interval`, 1-D: the elements [start, stop) of
    the local tensor's flat form as it lies in memory, padded rows included.
    """

    @property
    def tensor(self) -> Tensor:
        """The live memory of this shard."""
        ...

    @property
    def layout(self) -> Layout:
        """The layout of the parameter."""
        ...

    @property
    def interval(self) -> tuple[int, int] | None:
        """Which elements of the flat local tensor, if not all."""
        ...


def stacked_key(name: str, stacks: Stacks) -> tuple[str, int | None, str]:
    """`decoder.layers.7.x` -> (`decoder.layers.x`, 7, `decoder.layers`) where the last is a stack."""
    for stack in stacks:
        if match := re.match(re.escape(stack) + r"\.(\d+)\.", name):
            return f"{stack}.{name[match.end() :]}", int(match[1]), stack
    return name, None, ""


def refuse_freed(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor whose memory is given back, as ZeRO-3 does between uses."""
    allocated = tensor.untyped_storage().nbytes()
    needed = tensor.numel() * tensor.itemsize
    if allocated < needed:
        raise ValueError(
            f"{name} has {allocated} bytes of memory for {needed}: it is sharded (ZeRO-3); "
            "take the model's state from core.optimizer.sharded_state_dict(shard), shard being its DataParallel "
            "(save_huggingface takes the shard itself)"
        )


class Mapper:
    """Makes sharded tensors of one rank: its coordinates in the mesh, and which lists of layers are stacks.

    by_layer: keys in stacks of which some layers have nothing to save, as frozen ones have no states: an array each.
    from_first: of all that it makes.
    """

    def __init__(
        self,
        ps: ParallelState,
        stacks: Stacks,
        by_layer: Collection[str] = (),
        *,
        from_first: bool = False,
    ) -> None:
        self._from_first = from_first
        self._coordinate = ps.coordinate
        self._sizes = ps.sizes
        self._by_layer = by_layer
        self._stacks = {name: Stack.of(layers) for name, layers in stacks.items()}

    def parameter(self, group: str, name: str, tensor: Tensor, layout: Layout) -> ShardedTensor:
        """The true part of a local tensor that lies as `layout` says: without the rows that pad a vocabulary.

        Raises ValueError: a tensor whose memory is given back, as ZeRO-3 does between uses.
        """
        refuse_freed(name, tensor)
        data = tensor.detach()
        # a DTensor's padding is cut when its local shards are made
        if not is_dtensor(data):
            data = true_part(data, layout, self._coordinate, self._sizes)
        return self.sharded_tensor(
            group, name, layout, data, self._local_box(layout), tensor.detach()
        )

    def interval(
        self, group: str, name: str, flat: Tensor, layout: Layout, interval: tuple[int, int]
    ) -> list[ShardedTensor]:
        """The true elements of an interval of the local tensor's flat form: a box for each straight piece.

        ZeRO cuts the flat buffers of a bucket, not the parameters, so that an interval may begin and end inside rows.
        """
        local_box = self._local_box(layout)
        offset = [start for start, _ in local_box]
        true_box = whole(extent(local_box))
        tensors, first = [], 0
        for flat_box in flat_boxes(layout.local_shape(self._sizes), *interval):
            elements = flat[first : first + volume(flat_box)].view(extent(flat_box))
            first += volume(flat_box)
            unpadded = intersect(flat_box, true_box)
            if unpadded is not None:
                data = elements[slices(relative(unpadded, flat_box))]
                tensors.append(
                    self.sharded_tensor(group, name, layout, data, shifted(unpadded, offset), None)
                )
        return tensors

    def _local_box(self, layout: Layout) -> Box:
        """The box of the full tensor that this rank holds, without padding."""
        return tuple((cut.start, cut.stop) for cut in layout.box(self._coordinate, self._sizes))

    def sharded_tensor(
        self, group: str, name: str, layout: Layout, data: Tensor, box: Box, local: Tensor | None
    ) -> ShardedTensor:
        """`data`, which is `box` of one parameter, as a shard of its array: the stack's, for a layer of a stack."""
        # one layer of a stack is one row along dim 0 of the stack's array
        key, layer, stack = stacked_key(name, self._stacks)
        if key in self._by_layer:
            key, layer, stack = name, None, ""
        stack_shape: tuple[int, ...] = ()
        stack_offset: tuple[int, ...] = ()
        some_layers: tuple[int, ...] = ()
        depth = 0
        if layer is not None:
            numbers = self._stacks[stack].having(key[len(stack) + 1 :], layer)
            stack_shape = (len(numbers),)
            stack_offset = (numbers.index(layer),)
            if len(numbers) < self._stacks[stack].layers:
                some_layers, depth = numbers, self._stacks[stack].layers
        # the grid of cells follows the tensor-parallel cut, or else the first cut of any axis
        if "tp" in layout.split:
            axis = "tp"
        else:
            axis = next(iter(layout.split), "tp")
        tp_dim = layout.split.get(axis)
        if tp_dim is not None:
            tp_dim += len(stack_shape)
        return ShardedTensor(
            key=f"{group}/{key}",
            data=data,
            global_shape=stack_shape + layout.shape,
            global_offset=stack_offset + tuple(start for start, _ in box),
            replica_id=0 if layout.owned_by(self._coordinate) else 1,
            prepend_axis_num=len(stack_shape),
            tp_dim=tp_dim,
            stack=stack,
            local=local,
            layers=some_layers,
            depth=depth,
            axis=axis,
            from_first=self._from_first,
        )

    def state_shard(
        self, group: str, name: str, shard: StateShard
    ) -> ShardedTensor | list[ShardedTensor]:
        """A shard of an optimizer's state; an interval becomes one tensor for each straight piece of it."""
        if shard.interval is not None:
            return self.interval(group, name, shard.tensor, shard.layout, shard.interval)
        return self.sharded_tensor(
            group, name, shard.layout, shard.tensor, self._local_box(shard.layout), None
        )


def sharded_state_dict(
    modules: Modules, ps: ParallelState, *, prefix: str = ""
) -> dict[str, ShardedTensor]:
    """name -> this rank's shard of every parameter and persistent buffer of a module, or of a pipeline's stages.

    Keys are `model/<prefix><name>`. A parameter lies as its `Layout` says; one without a layout, and every buffer,
    is the same on all ranks: of buffers the first rank's count. A parameter shared by several names is there once.
    Stages of one's own in a mapping stage -> module have names of their own; else `save` refuses other values of one
    name on two pipeline ranks.
    """
    tell_of_own_states(modules)
    stacks = {prefix + name: stack for name, stack in named_stacks(modules).items()}
    mapper = Mapper(ps, stacks)
    tensors = {}
    for name, parameter in named_parameters(modules):
        full_name = prefix + name
        tensors[full_name] = mapper.parameter("model", full_name, parameter, layout_of(parameter))
    mapper = Mapper(ps, stacks, from_first=True)
    for name, buffer in named_buffers(modules):
        key = prefix + name
        tensors[key] = mapper.parameter("model", key, buffer, Layout(tuple(buffer.shape)))
    return tensors


def sharded_states(
    states: Mapping[str, Mapping[str, StateShard]],
    ps: ParallelState,
    *,
    stacks: Stacks,
    group: str = "optimizer",
) -> dict[str, dict[str, ShardedTensor | list[ShardedTensor]]]:
    """name -> kind -> this rank's shard of an optimizer's states, under `optimizer/<kind>/<name>`.

    An interval of padded rows only is left out: the full array has nothing of it.
    """
    mapper = Mapper(ps, stacks)
    tensors: dict[str, dict[str, ShardedTensor | list[ShardedTensor]]] = {}
    for name, shards in states.items():
        tensors[name] = {}
        for kind, shard in shards.items():
            tensor = mapper.state_shard(f"{group}/{kind}", name, shard)
            if tensor != []:
                tensors[name][kind] = tensor
    return tensors
