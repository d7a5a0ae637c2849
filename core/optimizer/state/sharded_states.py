"""A sharded optimizer's states by name: as live shards, as sharded tensors of a checkpoint, and back."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from core.data_parallel import DataParallel
from core.dist_checkpointing.state.left_out import tell_of_own_states
from core.dist_checkpointing.state.mapping import Mapper, ShardedObject, ShardedTensor, stacked_key
from core.dist_checkpointing.state.mapping import sharded_state_dict as module_state_dict
from core.optimizer.state.flat_shard import ParameterShard, parameter_shards
from core.optimizer.state.state_buffers import StateBuffer
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.layout import Layout, Slices, layout_of, true_part
from core.parallel_state.modules import (
    named_buffers,
    named_parameters,
    named_stacks,
)
from core.parallel_state.state import ParallelState


@dataclass(frozen=True, eq=False)
class OptimizerShard:
    """This rank's shard (no padded rows) of one state tensor of one parameter: a live view, and where it lies.

    layout: of the full tensor, the parameter's. box: the slices of the full tensor that `tensor` is. interval: where
    ZeRO cuts flat buffers, `tensor` is 1-D, elements [start, stop) of the local tensor's flat form, padded rows
    included.
    """

    tensor: Tensor
    layout: Layout
    box: Slices
    interval: tuple[int, int] | None = None


# live elements of one state of one parameter, ascending
Views = list[tuple[Tensor, ParameterShard]]
States = Mapping[str, Mapping[str, Tensor | OptimizerShard]]


def _views_by_name(
    state_buffers: list[StateBuffer], *, own_mains: bool = True
) -> dict[str, dict[str, Views]]:
    """name -> kind -> what this rank has of it; own_mains: "main" also of weights that are their own main weights."""
    views: dict[str, dict[str, Views]] = {}
    for state_buffer in state_buffers:
        if own_mains:
            main = state_buffer.updated
        else:
            main = state_buffer.main
        for shard in state_buffer.parameter_shards:
            tensors: dict[str, Tensor] = {} if main is None else {"main": main}
            for kind in state_buffer.kinds[shard.name]:
                tensors[kind] = state_buffer.states[kind]
            for kind, flat in tensors.items():
                kind_views = views.setdefault(shard.name, {}).setdefault(kind, [])
                kind_views.append((flat[slice(*shard.span)], shard))
    return views


def _joined(views: Views) -> Tensor:
    """The live memory, or a copy on the host where an offload's fraction cuts the parameter."""
    if len(views) == 1:
        return views[0][0]
    return torch.cat([tensor.cpu() for tensor, _ in views])


def _optimizer_shard(
    flat: Tensor, views: Views, ps: ParallelState, *, full_shapes: bool
) -> OptimizerShard:
    first = views[0][1]
    last = views[-1][1]
    layout = first.layout
    box = layout.box(ps.coordinate, ps.sizes)
    if not full_shapes:
        return OptimizerShard(flat, layout, box, (first.interval[0], last.interval[1]))
    local = flat.view(layout.local_shape(ps.sizes))
    return OptimizerShard(true_part(local, layout, ps.coordinate, ps.sizes), layout, box)


def optimizer_shards(
    state_buffers: list[StateBuffer],
    ps: ParallelState,
    *,
    full_shapes: bool,
    own_mains: bool = True,
) -> dict[str, dict[str, OptimizerShard]]:
    """name -> kind -> this rank's shard.

    full_shapes: shards have the local parameter's shape without padded rows, else they are flat intervals.
    own_mains: "main" also of weights that are their own main weights.
    """
    shards: dict[str, dict[str, OptimizerShard]] = {}
    for name, kinds in _views_by_name(state_buffers, own_mains=own_mains).items():
        shards[name] = {}
        for kind, views in kinds.items():
            shards[name][kind] = _optimizer_shard(
                _joined(views), views, ps, full_shapes=full_shapes
            )
    return shards


def load_states(
    state_buffers: list[StateBuffer],
    ps: ParallelState,
    states: States,
    whole: Mapping[str, Mapping[str, OptimizerShard]],
    *,
    full_shapes: bool,
    own_mains: bool = True,
) -> None:
    """Copy states into the buffers, and into `whole` ones, which lie in none.

    Raises ValueError, before anything is written: what is not this rank's.
    """
    local = _views_by_name(state_buffers, own_mains=own_mains)
    held = local.keys() | whole.keys()
    if names := sorted(held ^ states.keys()):
        raise ValueError(
            f"load_states: {len(states)} parameters given for {len(held)}; not on both sides: "
            f"{', '.join(names[:5])}; build the same model at the same layout, or load a checkpoint, which fits any"
        )
    # Step 1: check everything, so that a mistake leaves all states as they were.
    writes: list[tuple[OptimizerShard, Tensor, Tensor, Views]] = []
    for name, kinds in local.items():
        for kind, views in kinds.items():
            flat = _joined(views)
            target = _optimizer_shard(flat, views, ps, full_shapes=full_shapes)
            writes.append((target, _matching_tensor(states[name], name, kind, target), flat, views))
    for name, shards in whole.items():
        for kind, target in shards.items():
            source = _matching_tensor(states[name], name, kind, target)
            writes.append((target, source, target.tensor, []))
    # Step 2: write. A parameter that an offload's fraction cuts was joined into a copy, which is taken apart again.
    for target, source, flat, views in writes:
        target.tensor.copy_(source)
        if len(views) > 1:
            start = views[0][1].interval[0]
            for tensor, shard in views:
                tensor.copy_(flat[shard.interval[0] - start : shard.interval[1] - start])


def _matching_tensor(
    kinds: Mapping[str, Tensor | OptimizerShard], name: str, kind: str, local: OptimizerShard
) -> Tensor:
    if kind not in kinds:
        raise ValueError(
            f"load_states: {name} has {sorted(kinds)} but not {kind}; give all that states() gives"
        )
    state = kinds[kind]
    if isinstance(state, OptimizerShard):
        tensor = state.tensor
        interval = state.interval
    else:
        tensor = state
        interval = local.interval
    if tensor.shape != local.tensor.shape or interval != local.interval:
        raise ValueError(
            f"load_states: {kind} of {name} is {tuple(tensor.shape)}, elements {interval}; this rank holds "
            f"{tuple(local.tensor.shape)}, elements {local.interval}; give what states() gave at the same layout"
        )
    return tensor


def checkpoint_states(
    state_buffers: list[StateBuffer],
    shard: DataParallel,
    counts: Mapping[str, Any],
    whole: Mapping[str, Mapping[str, OptimizerShard]],
) -> dict[str, Any]:
    """What a checkpoint takes: counts as objects under `optimizer/`, states as lists of boxes in live memory.

    All-gather of objects over pp.
    """
    stacks = named_stacks(shard.module)
    trained = shard.named_parameters()
    frozen = [
        stacked_key(name, stacks)[0]
        for name, _ in named_parameters(shard.module)
        if name not in trained
    ]
    partly_frozen = set(chain.from_iterable(all_gather_objects(frozen, shard.ps.group("pp"))))
    mapper = Mapper(shard.ps, stacks, partly_frozen)
    states: dict[str, dict[str, list[ShardedTensor]]] = {}
    for name, kinds in _views_by_name(state_buffers, own_mains=False).items():
        states[name] = {}
        for kind, views in kinds.items():
            boxes = list(_sharded_tensors(mapper, f"optimizer/{kind}", views))
            # a rank that holds nothing but padded rows has none
            if boxes:
                states[name][kind] = boxes
    for name, shards in whole.items():
        for kind, state in shards.items():
            found = mapper.state_shard(f"optimizer/{kind}", name, state)
            states.setdefault(name, {})[kind] = found if isinstance(found, list) else [found]
    objects = {key: ShardedObject(f"optimizer/{key}", value) for key, value in counts.items()}
    return objects | {"states": states}


def _sharded_tensors(mapper: Mapper, group: str, views: Views) -> Iterator[ShardedTensor]:
    for tensor, shard in views:
        yield from mapper.interval(group, shard.name, tensor, shard.layout, shard.interval)


def sharded_state_dict(shard: DataParallel) -> dict[str, ShardedTensor | list[ShardedTensor]]:
    """name -> this rank's shard of every parameter and persistent buffer of the model, at any ZeRO stage.

    Waits for weights under way. Buffers are the first data rank's: collective where they changed. At stage 3
    trainable parameters are the intervals that this rank holds (after a load call `shard.publish()`, or
    `optimizer.load_state_dict`), so nothing is gathered; the files are the same.
    """
    if isinstance(shard, nn.Module):
        raise ValueError(
            f"sharded_state_dict of core.optimizer takes the DataParallel, not its {type(shard).__name__}; of a "
            "module alone it is sharded_state_dict(module, ps) of core.dist_checkpointing"
        )
    shard.wait()
    shard.take_weights()
    # running statistics: all of the first data rank, not some of each
    shard.copies.send()
    if shard.zero_stage < 3:
        return dict(module_state_dict(shard.module, shard.ps))
    # a load writes shards: whole weights of a loan, or left by a forward, would be read and put back over them
    for buffer in shard.buffers:
        if not buffer.unsharded:
            buffer.end_loan()
            buffer.free()
    tell_of_own_states(shard.module)
    mapper = Mapper(shard.ps, named_stacks(shard.module))
    state: dict[str, ShardedTensor | list[ShardedTensor]] = {}
    # trainable parameters: intervals of the flat buffers
    for buffer in shard.buffers:
        for parameter_shard in parameter_shards(buffer.segments, 0, buffer.weights.numel()):
            view = buffer.weights[slice(*parameter_shard.span)]
            if boxes := list(_sharded_tensors(mapper, "model", [(view, parameter_shard)])):
                state[parameter_shard.name] = boxes
    # frozen parameters and buffers: every rank has them in full
    trainable = shard.named_parameters()
    for name, parameter in named_parameters(shard.module):
        if name not in trainable:
            state[name] = mapper.parameter("model", name, parameter, layout_of(parameter))
    mapper = Mapper(shard.ps, named_stacks(shard.module), from_first=True)
    for name, tensor in named_buffers(shard.module):
        state[name] = mapper.parameter("model", name, tensor, Layout(tuple(tensor.shape)))
    return state
