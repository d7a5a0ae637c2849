"""Are the replicas still the same? A check for tests, for starts and for doubts; not for every step."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from core.data_parallel.buffers.buffers import Buffer
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.layout import layout_of, true_part
from core.parallel_state.modules import Modules, named_parameters
from core.parallel_state.state import ParallelState

Key = tuple[str, Any, int]


def _key(name: str, parameter: Tensor, ps: ParallelState, interval: tuple[int, int] | None = None) -> Key:
    """What two ranks share exactly when their parts must be equal: the name, the box, the elements of it, the stage.

    A parameter tied over the pipeline's ends is the same on both, so its stage does not count.
    """
    layout = layout_of(parameter)
    box = tuple((s.start, s.stop) for s in layout.box(ps.coordinate, ps.sizes))
    return (
        name,
        (*box, *([interval] if interval is not None else [])),
        0 if "embedding" in layout.partial else ps.coordinate["pp"],
    )


def _checksum(part: Tensor) -> str:
    return blake2b(part.reshape(-1).view(torch.uint8).cpu().numpy().tobytes(), digest_size=16).hexdigest()


def check_replicas(module: Modules, ps: ParallelState) -> None:
    """Compare every parameter, bit for bit, over the ranks that hold the same part of it.

    One all-gather of checksums over the world; the verdict is the same on every rank.
    Raises ValueError: naming the first parameter that differs, and the ranks that are alone with their values.
    """
    compare(_whole(named_parameters(module), ps), ps)


def check_shards(buffers: Sequence[Buffer], module: Modules, ps: ParallelState) -> None:
    """`check_replicas` where parameters are divided (ZeRO-3): HSDP copies, tensor ranks that hold the same, and
    frozen parameters, which nobody divides."""
    held = [(buffer.weights, segment) for buffer in buffers for segment in buffer.segments]
    parts = [(_key(s.name, s.parameter, ps, s.interval), weights[slice(*s.span)]) for weights, s in held]
    cut = {id(parameter) for buffer in buffers for parameter in buffer.parameters}
    compare(parts + _whole(((name, p) for name, p in named_parameters(module) if id(p) not in cut), ps), ps)


def _whole(named: Iterable[tuple[str, Tensor]], ps: ParallelState) -> list[tuple[Key, Tensor]]:
    return [(_key(name, p, ps), true_part(p.detach(), layout_of(p), ps.coordinate, ps.sizes)) for name, p in named]


def compare(parts: Iterable[tuple[Key, Tensor]], ps: ParallelState) -> None:
    """Raise ValueError, on every rank, where two ranks hold other bits under one key."""
    mine = [(key, _checksum(part)) for key, part in parts]
    found: dict[Key, dict[str, list[int]]] = {}
    for rank, theirs in enumerate(all_gather_objects(mine, ps.world)):
        for key, checksum in theirs:
            found.setdefault(key, {}).setdefault(checksum, []).append(rank)
    for key, holders in found.items():
        if len(holders) > 1:
            raise ValueError(
                f"{key[0]} (part {list(key[1])}) {_who(holders)}; initialise all from one seed, or load all from one "
                "checkpoint; in the middle of a run: memory or a message was damaged"
            )


def _who(holders: dict[str, list[int]]) -> str:
    """In words: who is alone, where most agree."""
    (one, most), (other, next_most), *_ = ranked = sorted(holders.items(), key=lambda item: -len(item[1]))
    between = f"{one[:8]}… and {other[:8]}…"
    if len(most) == len(next_most):
        return f"differs between ranks {most[0]} and {next_most[0]}: {between}"
    odd = ", ".join(str(rank) for rank in sorted(rank for _, ranks in ranked[1:] for rank in ranks))
    return f"on rank {odd} is not what most hold, as rank {most[0]} does: {between}"
