"""Collectives that a program calls on a weight or a gradient of which other ranks hold the rest."""

from dataclasses import replace
from typing import Any

from core.parallel_state.by_hand.heard import Heard
from core.parallel_state.collectives.calls import group_of_call

# of torch.distributed, and of its operators on tensors that hear of operators only
_PUT_TOGETHER = {"all_reduce", "all_reduce_coalesced", "broadcast", "reduce"}
_PUT_TOGETHER |= {"allreduce", "allreduce_coalesced"}


def heard_meeting(source: Heard, name: str, args: tuple, kwargs: dict[str, Any]) -> Heard | None:
    """Kind "sum" of what puts values of several ranks together; None of another function."""
    if name not in _PUT_TOGETHER:
        return None
    group, adds = group_of_call(args, kwargs)
    name = name.replace("allr", "all_r")
    return replace(source, kind="sum", name=name, group=group, adds=adds and name != "broadcast")
