"""What a program gave a collective of torch.distributed, its functions or its operators."""

from typing import Any

from torch.distributed import ProcessGroup, ReduceOp

from core.parallel_state.collectives.groups import group_named

# `ReduceOp.SUM` of an operator
_SUM = 0


def group_of_call(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """The group, None for the world, and whether the values of its ranks are added up. args: begin with a tensor."""
    given = [*args[1:], *kwargs.values()]
    # operators are given these as objects of TorchScript's
    boxed = {str(x._type()).rpartition(".")[2]: x for x in given if hasattr(x, "_type")}
    group = kwargs.get("group")
    op: Any = kwargs.get("op", next((x for x in given if isinstance(x, ReduceOp)), None))
    if "ProcessGroup" in boxed:
        group = ProcessGroup.unbox(boxed["ProcessGroup"])
    if "ReduceOp" in boxed:
        op = boxed["ReduceOp"].op()
    words = [x for x in given if isinstance(x, str)]
    if group is None and words:
        op, group = words[0], group_named(words[-1])
    return group, op in (None, "sum", ReduceOp.SUM, _SUM)
