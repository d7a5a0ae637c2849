"""Whether all ranks were told the same run, asked once at start."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.collectives.groups import DEFAULT_TIMEOUT_S, world_group
from core.training.config.run import RunConfig

_SHOWN = 8


def same_on_all_ranks(run: RunConfig) -> None:
    """Collective on the world, before any `ParallelState` exists: all-gathers a hash, and all values if it differs.

    Raises ValueError on every rank where the values or the versions of two ranks differ: each difference from rank 0,
    with both values. One process without torchrun has nothing to compare.
    """
    world, software = world_group(DEFAULT_TIMEOUT_S), _versions()
    if len(set(all_gather_objects((run.digest(), *software.values()), world))) == 1:
        return
    told = all_gather_objects(run.flat() | software, world)
    if wrong := _differences(told):
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError("; ".join(wrong[:_SHOWN]) + f"{more}. Give every rank the same files, flags and software")


def _versions() -> dict[str, str]:
    try:
        ours = version("paracore")
    except PackageNotFoundError:  # run from its sources
        ours = "unknown"
    return {
        "paracore": ours,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }


def _differences(told: list[dict[str, Any]]) -> list[str]:
    first = told[0]
    return [
        f"rank {rank} differs from rank 0: {name} {mine.get(name)!r} != {first.get(name)!r}"
        for rank, mine in enumerate(told)
        for name in first | mine
        if mine.get(name) != first.get(name)
    ]
