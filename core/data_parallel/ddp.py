"""torch's DistributedDataParallel over the data ranks of a model that tensor or pipeline ranks share."""

from typing import Any

import torch
from torch import nn

from core.parallel_state import ParallelState, current_state
from core.parallel_state.by_hand import watch_rows_of_own
from core.parallel_state.collectives.groups import is_initialized


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's, over the data group unless `process_group` is given: over all ranks it would mix different parts.

    parallel: the layout of ranks; default: the module's own, or the current state. Collective over the data group.
    """

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        parallel: ParallelState | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("process_group") is None:
            own = getattr(module, "parallel", None)
            ps = parallel or (own if isinstance(own, ParallelState) else current_state())
            if not is_initialized():
                raise ValueError(
                    "DistributedDataParallel averages over processes and there is 1, without a process group: leave "
                    "it out, or call torch.distributed.init_process_group first"
                )
            kwargs["process_group"] = ps.torch_group("dp-cp").process_group
            watch_rows_of_own(module, ps.size("cp"))
        super().__init__(module, *args, **kwargs)
