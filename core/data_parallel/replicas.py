"""Are the replicas still equal, bit for bit? A check for tests and for doubts; not for every step."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from core.data_parallel.buffers.buffers import Buffer
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.collectives.checks import mixed_words
from core.parallel_state.layout import layout_of, true_part
from core.parallel_state.modules import Modules, named_parameters
from core.parallel_state.state import ParallelState

Key = tuple[str, Any, int]


def _shard_key(
    name: str, parameter: Tensor, ps: ParallelState, interval: tuple[int, int] | None = None
) -> Key:
    """Equal on two ranks exactly when their shards must be equal: the name, the box, the elements of it, the stage.

    A parameter tied over the pipeline's ends is the same on both, so its stage does not count.
    """
    layout = layout_of(parameter)
    box = tuple((s.start, s.stop) for s in layout.box(ps.coordinate, ps.sizes))
    return (
        name,
        (*box, *([interval] if interval is not None else [])),
        0 if "embedding" in layout.partial else ps.coordinate["pp"],
    )


def _checksum(tensor: Tensor) -> str:
    """Of the bits. An accelerator's are mixed there: every weight over the bus and through a hash takes long."""
    if tensor.device.type == "cpu":
        return blake2b(
            tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=16
        ).hexdigest()
    return " ".join(f"{word & 0xFFFFFFFFFFFFFFFF:016x}" for word in mixed_words(tensor).tolist())


def check_replicas(module: Modules, ps: ParallelState) -> None:
    """Compare every parameter, bit for bit, over the ranks that hold the same shard of it.

    One all-gather of checksums over the world; the verdict is the same on every rank.
    Raises ValueError: naming the first parameter that differs, and the ranks that are alone with their values.
    """
    compare(_keyed_parameters(named_parameters(module), ps), ps)


def check_shards(buffers: Sequence[Buffer], module: Modules, ps: ParallelState) -> None:
    """`check_replicas` where parameters are divided (ZeRO-3): HSDP copies, tensor ranks that hold the same, and
    frozen parameters, which nobody divides."""
    segments = [(buffer.weights, segment) for buffer in buffers for segment in buffer.segments]
    tensors = [
        (_shard_key(s.name, s.parameter, ps, s.interval), weights[slice(*s.span)])
        for weights, s in segments
    ]
    divided_ids = set()
    for buffer in buffers:
        for parameter in buffer.parameters:
            divided_ids.add(id(parameter))
    compare(
        tensors
        + _keyed_parameters(
            ((name, p) for name, p in named_parameters(module) if id(p) not in divided_ids), ps
        ),
        ps,
    )


def _keyed_parameters(
    named: Iterable[tuple[str, Tensor]], ps: ParallelState
) -> list[tuple[Key, Tensor]]:
    return [
        (_shard_key(name, p, ps), true_part(p.detach(), layout_of(p), ps.coordinate, ps.sizes))
        for name, p in named
    ]


def compare(tensors: Iterable[tuple[Key, Tensor]], ps: ParallelState) -> None:
    """Raise ValueError, on every rank, where two ranks hold other bits under one key."""
    local = [(key, _checksum(tensor)) for key, tensor in tensors]
    holders_of: dict[Key, dict[str, list[int]]] = {}
    # checksums travel, not values; every rank then finds the same verdict by itself
    for rank, rank_checksums in enumerate(all_gather_objects(local, ps.world)):
        for key, checksum in rank_checksums:
            holders_of.setdefault(key, {}).setdefault(checksum, []).append(rank)
    for key, holders in holders_of.items():
        if len(holders) > 1:
            raise ValueError(
                f"{key[0]} (part {list(key[1])}) {_outliers(holders)}; initialise all from one seed, or load all "
                "from one checkpoint; in the middle of a run: memory or a message was damaged"
            )


def _outliers(holders: dict[str, list[int]]) -> str:
    """For the message: the ranks whose values are not the majority's."""
    # most holders first; equal counts leave open who is right
    (common, majority), (second_common, second_ranks), *_ = ranked = sorted(
        holders.items(), key=lambda item: -len(item[1])
    )
    between = f"{common[:8]}… and {second_common[:8]}…"
    if len(majority) == len(second_ranks):
        return f"differs between ranks {majority[0]} and {second_ranks[0]}: {between}"
    odd_ranks = []
    for _, ranks in ranked[1:]:
        odd_ranks += ranks
    odd = ", ".join(map(str, sorted(odd_ranks)))
    return f"on rank {odd} is not what most hold, as rank {majority[0]} does: {between}"
