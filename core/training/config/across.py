"""Checks once, at the start, that all ranks have the same configuration and software."""

import platform
from typing import Any

import torch

from core import __version__
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.collectives.groups import DEFAULT_TIMEOUT_S, world_group
from core.training.config.run import RunConfig

_MAX_SHOWN = 8


def same_on_all_ranks(run: RunConfig) -> None:
    """Collective on the world, before any `ParallelState` exists: all-gathers a hash, and all values if it differs.

    Raises ValueError on every rank where the values or the versions of two ranks differ: each difference from rank 0,
    with both values. One process without torchrun has nothing to compare.
    """
    # a hash first: it is equal in nearly every run, and then nothing else is sent
    world = world_group(DEFAULT_TIMEOUT_S)
    software = _versions()
    if len(set(all_gather_objects((run.digest(), *software.values()), world))) == 1:
        return
    per_rank = all_gather_objects(run.flat() | software, world)
    differences = _differences(per_rank)
    if differences:
        hidden = len(differences) - _MAX_SHOWN
        more = f"; and {hidden} more" if hidden > 0 else ""
        raise ValueError(
            "; ".join(differences[:_MAX_SHOWN])
            + f"{more}. Give every rank the same files, flags and software"
        )


def _versions() -> dict[str, str]:
    return {
        "paracore": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }


def _differences(per_rank: list[dict[str, Any]]) -> list[str]:
    first = per_rank[0]
    messages = []
    for rank, values in enumerate(per_rank):
        for name in first | values:
            value = values.get(name)
            expected = first.get(name)
            if value != expected:
                messages.append(
                    f"rank {rank} differs from rank 0: {name} {value!r} != {expected!r}"
                )
    return messages
