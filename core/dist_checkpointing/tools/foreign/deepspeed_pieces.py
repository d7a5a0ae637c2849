"""Where the numbers of each parameter lie in the flat partitions of ZeRO's ranks. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from core.dist_checkpointing.tools.foreign.dcp import SavedTensor
from core.dist_checkpointing.tools.foreign.inert import Record
from core.dist_checkpointing.tools.foreign.torch_archive import ArchivedTensor
from core.parallel_state.flat import flat_boxes, volume

Shape = tuple[int, ...]
MAIN = "main"
STEP = "step"


@dataclass(frozen=True)
class FlatPiece:
    """Elements [start, stop) of a parameter's flat form lie in `tensor` from element `first` on."""

    start: int
    stop: int
    tensor: ArchivedTensor
    first: int


@dataclass
class States:
    """kinds: kind -> name -> its pieces, the main weights among them. steps: name -> updates (int or a tensor)."""

    kinds: dict[str, dict[str, list[FlatPiece]]] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, name: str, piece: FlatPiece) -> None:
        """Note one more interval of a parameter's elements, in whatever order files bring them."""
        self.kinds.setdefault(kind, {}).setdefault(name, []).append(piece)


def saved_tensor(name: str, shape: Shape, pieces: Sequence[FlatPiece]) -> SavedTensor:
    """The tensor whose pieces these are. Raises ValueError: they are not all of it, or of several dtypes."""
    dtypes = sorted({piece.tensor.dtype for piece in pieces})
    elements = sum(piece.stop - piece.start for piece in pieces)
    if len(dtypes) != 1 or elements != prod(shape):
        raise ValueError(
            f"{name}: {elements} of {prod(shape)} elements are there, of {', '.join(dtypes)}; its files are not of "
            "one checkpoint"
        )
    shards = []
    for piece in pieces:
        position = piece.first
        for box in flat_boxes(shape, piece.start, piece.stop):
            size = volume(box)
            shards.append((box, piece.tensor.interval(position, position + size)))
            position += size
    return SavedTensor(shape, dtypes[0], tuple(shards))


def whole_piece(tensor: ArchivedTensor) -> list[FlatPiece]:
    """All of a tensor."""
    return [FlatPiece(0, tensor.numel, tensor, 0)]


def stage_of(optimizer: Mapping[str, Any]) -> int:
    """1, 2 or 3. Raises ValueError: the file does not say."""
    stage = optimizer.get("zero_stage")
    # an enumeration's member
    if isinstance(stage, Record) and len(stage.arguments) == 1:
        (stage,) = stage.arguments
    if stage not in (1, 2, 3):
        raise ValueError(
            f"zero_stage={stage!r} of the optimizer's files is not read; 1, 2 and 3 are"
        )
    return int(stage)


def stages_1_and_2(
    optimizers: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Shape]]
) -> States:
    """Each group is one flat vector of its parameters, cut into as many partitions as there are ranks."""
    states = States()
    for number, group in enumerate(shapes):
        flats = [
            _flat(optimizer, "single_partition_of_fp32_groups", number) for optimizer in optimizers
        ]
        paddings = [_number_of(optimizer, "group_paddings", number) for optimizer in optimizers]
        sizes = {flat.numel + padding for flat, padding in zip(flats, paddings, strict=True)}
        if len(sizes) != 1:
            raise ValueError(
                f"the partitions of group {number} have {sorted(sizes)} elements with their padding; every version "
                "that is read cuts them alike"
            )
        (size,) = sizes
        alignment = optimizers[0].get("param_alignment_paddings")
        after = alignment[number] if alignment else [0] * len(group)
        offset = 0
        for (name, shape), gap in zip(group.items(), after, strict=True):
            for rank, optimizer in enumerate(optimizers):
                begin = rank * size
                start = max(offset, begin)
                stop = min(offset + prod(shape), begin + flats[rank].numel)
                _check_mapping(optimizer, number, rank, name, max(0, stop - start), start - begin)
                if start < stop:
                    state = _state_of_group(optimizer, number)
                    _add(
                        states,
                        name,
                        flats[rank],
                        state,
                        start - offset,
                        stop - offset,
                        start - begin,
                    )
            offset += prod(shape) + gap
    return states


def stage_3(
    optimizers: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Shape]]
) -> States:
    """Each parameter is cut into equal parts, and a rank's parts follow each other through its flat sub-groups."""
    states, ranks = States(), len(optimizers)
    whole = {name: shape for group in shapes for name, shape in group.items()}
    for rank, optimizer in enumerate(optimizers):
        flats = _flats(optimizer, "fp32_flat_groups")
        group_starts = [0]
        for flat in flats:
            group_starts.append(group_starts[-1] + flat.numel)
        offset = 0
        for name, shape in whole.items():
            part = -(-prod(shape) // ranks)
            first = rank * part
            last = min((rank + 1) * part, prod(shape))
            for number, flat in enumerate(flats):
                start = max(offset, group_starts[number])
                stop = min(offset + last - first, group_starts[number + 1])
                if start < stop:
                    begin = first + start - offset
                    state = _state_of_group(optimizer, number)
                    where = start - group_starts[number]
                    _add(states, name, flat, state, begin, begin + stop - start, where)
            offset += part
        if offset != group_starts[-1]:
            raise ValueError(
                f"rank {rank} has {group_starts[-1]} main weights, its parts of all parameters are {offset}; the "
                "files are not of one checkpoint"
            )
    return states


def _add(
    states: States,
    name: str,
    flat: ArchivedTensor,
    state: Mapping[str, Any],
    start: int,
    stop: int,
    first: int,
) -> None:
    """The same piece of the main weights and of every state that is as long."""
    states.add(MAIN, name, FlatPiece(start, stop, flat, first))
    for kind, value in state.items():
        if kind == STEP:
            states.steps[name] = value
        elif isinstance(value, ArchivedTensor) and value.numel >= flat.numel:
            states.add(kind, name, FlatPiece(start, stop, value, first))


def _flats(optimizer: Mapping[str, Any], key: str) -> list[ArchivedTensor]:
    flats = optimizer.get(key)
    if not isinstance(flats, list) or not all(isinstance(flat, ArchivedTensor) for flat in flats):
        raise ValueError(
            f"the optimizer's files have no {key}: of parameters that were offloaded to NVMe, or of a version that "
            "is not read"
        )
    return flats


def _flat(optimizer: Mapping[str, Any], key: str, group: int) -> ArchivedTensor:
    flats = _flats(optimizer, key)
    if group >= len(flats):
        raise ValueError(f"{key} has {len(flats)} groups, the model has more")
    return flats[group]


def _number_of(optimizer: Mapping[str, Any], key: str, group: int) -> int:
    numbers = optimizer.get(key) or []
    return int(numbers[group]) if group < len(numbers) else 0


def _state_of_group(optimizer: Mapping[str, Any], group: int) -> Mapping[str, Any]:
    """The wrapped optimizer's states of one flat group; none: it was saved without."""
    state = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    if isinstance(state, list):  # elastic checkpoints: without padding
        return state[group] if group < len(state) else {}
    by_number: Any = (state or {}).get("state", {})
    numbers = [number for g in (state or {}).get("param_groups", ()) for number in g["params"]]
    return by_number.get(numbers[group], {}) if group < len(numbers) else {}


def _check_mapping(
    optimizer: Mapping[str, Any], group: int, rank: int, name: str, count: int, start: int
) -> None:
    """DeepSpeed says itself, since 0.7, where a rank's part of a parameter lies: it must be where we take it from."""
    mappings = optimizer.get("param_slice_mappings")
    if not mappings:
        return
    stated = mappings[group].get(name)
    expected = (count, start) if count else None
    if isinstance(stated, Record) and isinstance(stated.state, dict):
        stated = (stated.state.get("numel"), stated.state.get("start"))
        stated = stated if stated[0] else None
    if stated != expected:
        raise ValueError(
            f"{name}: rank {rank} says to hold (elements, first) {stated} of it, its place in the group makes "
            f"{expected}; this order of parameters is not read"
        )


def kinds_of(states: States) -> Iterator[str]:
    """Kinds beside the main weights."""
    return (kind for kind in states.kinds if kind != MAIN)
