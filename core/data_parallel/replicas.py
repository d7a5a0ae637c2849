"""Are the replicas still the same? A check for tests, for starts and for doubts; not for every step."""

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.layout import layout_of, true_part
from core.parallel_state.modules import Modules, named_parameters
from core.parallel_state.state import ParallelState

Key = tuple[str, Any, int]


def _key(name: str, parameter: Tensor, ps: ParallelState) -> Key:
    """What two ranks share exactly when their parts must be equal: the name, the box, the stage.

    A parameter tied over the pipeline's ends is the same on both, so its stage does not count.
    """
    layout = layout_of(parameter)
    box = tuple((s.start, s.stop) for s in layout.box(ps.coordinate, ps.sizes))
    return name, box, 0 if "embedding" in layout.partial else ps.coordinate["pp"]


def _checksum(parameter: Tensor, ps: ParallelState) -> str:
    part = true_part(parameter.detach(), layout_of(parameter), ps.coordinate, ps.sizes)
    return blake2b(part.reshape(-1).view(torch.uint8).cpu().numpy().tobytes(), digest_size=16).hexdigest()


def check_replicas(module: Modules, ps: ParallelState) -> None:
    """Compare every parameter, bit for bit, over the ranks that hold the same part of it.

    One all-gather of checksums over the world; the verdict is the same on every rank.
    Raises ValueError: naming the first parameter that differs, and two ranks that hold different values.
    """
    mine = [(_key(name, p, ps), _checksum(p, ps)) for name, p in named_parameters(module)]
    first: dict[Key, tuple[int, str]] = {}
    for rank, theirs in enumerate(all_gather_objects(mine, ps.world)):
        for key, checksum in theirs:
            holder, expected = first.setdefault(key, (rank, checksum))
            if checksum != expected:
                raise ValueError(
                    f"{key[0]} (part {list(key[1])}) differs between ranks {holder} and {rank}: {expected[:8]}… and "
                    f"{checksum[:8]}…; initialise both from one seed, or load both from one checkpoint"
                )
