"""The only place in `core/` that calls torch.distributed. A group of one rank is None, and costs no call."""

from core.parallel_state.collectives.groups import Group, Traffic
from core.parallel_state.collectives.ops import (
    BACKWARD_TAG,
    all_gather,
    all_gather_objects,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from core.parallel_state.collectives.p2p import Received, irecv, isend
from core.parallel_state.collectives.parts import own_part, start_gather_parts, start_sum_into_own

__all__ = [
    "BACKWARD_TAG",
    "Group",
    "Received",
    "Traffic",
    "all_gather",
    "all_gather_objects",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "irecv",
    "isend",
    "own_part",
    "reduce_scatter",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_gather_parts",
    "start_reduce_scatter",
    "start_sum_into_own",
]
