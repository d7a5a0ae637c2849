"""Parallel states on the pool's ranks, built once per layout and worker, because groups are not free.

No more than `KEPT` of a world: a thread of gloo's looks at each group a hundred times a second, and a hundred groups
on four ranks take a quarter of two cores. The first built is the first destroyed, in one order on all ranks.
"""

from collections import defaultdict

import torch.distributed as dist

from core.parallel_state import ParallelConfig, ParallelState

KEPT = 8
_states: dict[int, dict[ParallelConfig, ParallelState]] = defaultdict(dict)


def _state(world: int, config: ParallelConfig) -> ParallelState:
    built = _states[world]
    if config not in built:
        if len(built) == KEPT:
            built.pop(next(iter(built))).destroy()
        built[config] = ParallelState.build(config, device="cpu")
    return built[config]


def state(tp=1, pp=1, cp=1, sp=False, expert=1, replicate=1, **how):
    """The state of this rank; the data axis takes what is left of the job's world. `how`: cp_comm_type, ulysses.

    Valid until KEPT others were asked for.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = {"tensor": tp, "pipeline": pp, "context": cp, "expert": expert, "replicate": replicate}
    return _state(world, ParallelConfig(**sizes, sequence_parallel=sp, **how))
