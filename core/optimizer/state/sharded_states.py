"""A sharded optimizer's states by name: as live parts, as sharded tensors of a checkpoint, and back."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.data_parallel import DataParallel
from core.dist_checkpointing.state.mapping import Mapper, ShardedObject, ShardedTensor
from core.dist_checkpointing.state.mapping import sharded_state_dict as module_state_dict
from core.optimizer.state.flat_shard import ParameterPiece, pieces_of
from core.optimizer.state.parts import StateBuffer
from core.parallel_state.layout import Box, Layout, layout_of, true_part
from core.parallel_state.modules import named_buffers, named_parameters, named_stacks
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
    box: Box
    interval: tuple[int, int] | None = None


Pieces = list[tuple[Tensor, ParameterPiece]]  # live elements of one state of one parameter, ascending
States = Mapping[str, Mapping[str, Tensor | OptimizerShard]]


def _by_name(parts: list[StateBuffer], *, own_mains: bool = True) -> dict[str, dict[str, Pieces]]:
    """name -> kind -> what this rank holds; own_mains: also of weights that are their own main."""
    found: dict[str, dict[str, Pieces]] = {}
    for part in parts:
        main = part.updated if own_mains else part.main
        for piece in part.pieces:
            kinds = {kind: part.states[kind] for kind in part.kinds[piece.name]}
            for kind, flat in (kinds if main is None else {"main": main} | kinds).items():
                pieces = found.setdefault(piece.name, {}).setdefault(kind, [])
                pieces.append((flat[slice(*piece.at)], piece))
    return found


def _joined(pieces: Pieces) -> Tensor:
    """The live memory, or a copy on the host where an offload's fraction cuts it."""
    return pieces[0][0] if len(pieces) == 1 else torch.cat([tensor.cpu() for tensor, _ in pieces])


def _part(flat: Tensor, pieces: Pieces, ps: ParallelState, *, whole: bool) -> OptimizerShard:
    layout = pieces[0][1].layout
    box = layout.box(ps.coordinate, ps.sizes)
    if not whole:
        return OptimizerShard(flat, layout, box, (pieces[0][1].interval[0], pieces[-1][1].interval[1]))
    local = flat.view(layout.local_shape(ps.sizes))
    return OptimizerShard(true_part(local, layout, ps.coordinate, ps.sizes), layout, box)


def state_parts(
    parts: list[StateBuffer], ps: ParallelState, *, whole: bool, own_mains: bool = True
) -> dict[str, dict[str, OptimizerShard]]:
    """name -> kind -> this rank's part; `whole`: of the local shape, without padded rows; own_mains: also "main" of
    weights that are their own."""
    return {
        name: {kind: _part(_joined(pieces), pieces, ps, whole=whole) for kind, pieces in kinds.items()}
        for name, kinds in _by_name(parts, own_mains=own_mains).items()
    }


def load_states(
    parts: list[StateBuffer], ps: ParallelState, given: States, *, whole: bool, own_mains: bool = True
) -> None:
    """Copy given states into the parts. Raises ValueError, before anything is written: what is not this rank's."""
    mine = _by_name(parts, own_mains=own_mains)
    if names := sorted(mine.keys() ^ given.keys()):
        raise ValueError(
            f"load_states: {len(given)} parameters given for {len(mine)}; not on both sides: {', '.join(names[:5])}; "
            "build the same model at the same layout, or load a checkpoint, which fits any"
        )
    writes = []
    for name, kinds in mine.items():
        for kind, pieces in kinds.items():
            flat = _joined(pieces)
            part = _part(flat, pieces, ps, whole=whole)
            writes.append((part, _fitting(given[name], name, kind, part), flat, pieces))
    for part, source, flat, pieces in writes:
        part.tensor.copy_(source)
        for tensor, piece in pieces if len(pieces) > 1 else ():
            start = pieces[0][1].interval[0]
            tensor.copy_(flat[piece.interval[0] - start : piece.interval[1] - start])


def _fitting(kinds: Mapping[str, Tensor | OptimizerShard], name: str, kind: str, mine: OptimizerShard) -> Tensor:
    if kind not in kinds:
        raise ValueError(f"load_states: {name} has {sorted(kinds)} but not {kind}; give all that states() gives")
    found = kinds[kind]
    tensor, interval = (found.tensor, found.interval) if isinstance(found, OptimizerShard) else (found, mine.interval)
    if tensor.shape != mine.tensor.shape or interval != mine.interval:
        raise ValueError(
            f"load_states: {kind} of {name} is {tuple(tensor.shape)}, elements {interval}; this rank holds "
            f"{tuple(mine.tensor.shape)}, elements {mine.interval}; give what states() gave at the same layout"
        )
    return tensor


def sharded_parts(parts: list[StateBuffer], shard: DataParallel, counts: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint takes: counts as objects under `optimizer/`, states as lists of boxes in live memory."""
    mapper = Mapper(shard.ps, named_stacks(shard.module))
    states: dict[str, dict[str, list[ShardedTensor]]] = {}
    for name, kinds in _by_name(parts, own_mains=False).items():
        made = {kind: list(_boxes(mapper, f"optimizer/{kind}", pieces)) for kind, pieces in kinds.items()}
        states[name] = {kind: boxes for kind, boxes in made.items() if boxes}  # padded rows only: nothing of it
    return {key: ShardedObject(f"optimizer/{key}", value) for key, value in counts.items()} | {"states": states}


def _boxes(mapper: Mapper, group: str, pieces: Pieces) -> Iterator[ShardedTensor]:
    for tensor, piece in pieces:
        yield from mapper.interval(group, piece.name, tensor, piece.layout, piece.interval)


def sharded_state_dict(shard: DataParallel) -> dict[str, ShardedTensor | list[ShardedTensor]]:
    """name -> this rank's part of every parameter and persistent buffer of the model, at any ZeRO stage.

    Waits for weights under way. Buffers are the first data rank's: collective where they changed. At stage 3
    trainable parameters are the intervals that this rank holds (after a load call `shard.publish()`, or
    `optimizer.load_state_dict`), so nothing is gathered; the files are the same.
    """
    shard.wait()
    shard.take_weights()
    shard.copies.send()  # statistics of one rank, not some of each
    if shard.zero_stage < 3:
        return dict(module_state_dict(shard.module, shard.ps))
    mapper = Mapper(shard.ps, named_stacks(shard.module))
    made: dict[str, ShardedTensor | list[ShardedTensor]] = {}
    for buffer in shard.buffers:
        for piece in pieces_of(buffer.segments, 0, buffer.weights.numel()):
            if boxes := list(_boxes(mapper, "model", [(buffer.weights[slice(*piece.at)], piece)])):
                made[piece.name] = boxes
    cut = shard.named_parameters()
    for name, parameter in named_parameters(shard.module):
        if name not in cut:  # frozen, so whole
            made[name] = mapper.parameter("model", name, parameter, layout_of(parameter))
    for name, tensor in named_buffers(shard.module):
        made[name] = mapper.parameter("model", name, tensor, Layout(tuple(tensor.shape)))
    return made
