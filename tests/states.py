"""Parallel states on the pool's ranks, built once per layout and worker, because groups are not free."""

from functools import cache

import torch.distributed as dist

from core.parallel_state import ParallelConfig, ParallelState


@cache
def _state(world, **config):
    return ParallelState.build(ParallelConfig(**config), device="cpu")


def state(tp=1, pp=1, cp=1, sp=False, expert=1, replicate=1, **how):
    """The state of this rank; the data axis takes what is left of the job's world. `how`: cp_comm_type, ulysses."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = {"tensor": tp, "pipeline": pp, "context": cp, "expert": expert, "replicate": replicate}
    return _state(world, **sizes, sequence_parallel=sp, **how)
