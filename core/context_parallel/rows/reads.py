"""Numbers of a context rank's own rows that a program reads, or decides by, as if they were of all rows."""

import torch
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand.split_tensor import REPEATED, Call, SplitTensor

# of the rows that a rank has they say nothing about the others', in a log as well
_STATISTIC_NAMES = """
    max min amax amin aminmax argmax argmin kthvalue topk sort argsort median nanmedian quantile nanquantile mode
    std var std_mean var_mean
"""
STATISTICS = frozenset(_STATISTIC_NAMES.split())
READS = ("item", "tolist", "numpy", "array", "float", "int", "format", "repr", "str")
# what is decided by the numbers of several sequences, or said of them
DECISIONS = STATISTICS.union(READS, ("gt", "lt", "ge", "le", "eq", "softmax", "log_softmax"))
# a loss of this rank's rows, a number with a gradient
MEAN = "a mean of rows"
BRANCHES = ("gt", "lt", "ge", "le")
BRANCH_REMEDY = (
    "Decide by what all ranks have: mean = loss.detach().clone(); torch.distributed.all_reduce(mean, "
    "group=parallel_state.get_context_parallel_group()), over their number"
)
SUM_REMEDY = (
    "Sum it over the ranks before it is read: torch.distributed.all_reduce(x, "
    "group=parallel_state.get_context_parallel_group()); means of rows, equally many on each, over their number too"
)
NUMPY_REMEDY = (
    "What numpy or Python makes of a sequence's numbers one after the other, or of all of them, wants all: gather "
    "them first, core.context_parallel.gather_from_context_region(x, ps, dim=1), and cut what is made of them, "
    "ContextRows.of_state(ps).of(y, 1)"
)
LOG_REMEDY = (
    "Take it over all ranks before it is read: torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.MAX, "
    "group=parallel_state.get_context_parallel_group()); a median or a quantile wants the losses of all ranks "
    "(all_gather)"
)


def is_statistic(x: SplitTensor) -> bool:
    """Whether it is of this rank's rows, and nobody has written the ranks' into it since."""
    return bool(x.partial) and hasattr(x, "counted") and torch.equal(x, x.counted)


def may_count(x: torch.Tensor) -> bool:
    """Whether a loss may be made of it: a number, a mask, tokens."""
    return x.is_floating_point() or x.dtype is torch.bool or are_tokens(x)


def are_tokens(x: torch.Tensor) -> bool:
    """[b, s], or more."""
    return x.dtype is torch.int64 and x.dim() > 1


def is_moved(x: SplitTensor) -> bool:
    """Whether it was made across rows, or of rows by number; not what is only repeated on whole sequences."""
    return x.partial not in ("", REPEATED)


def decides(name: str, number: SplitTensor, is_read: bool, is_evaluation: bool) -> bool:
    """Whether something is decided by numbers of a rank's rows; of an evaluation they are no rank's."""
    are_several = bool(number.dim())
    # for numpy decides what is not seen
    is_used = (is_evaluation and name in DECISIONS) or (are_several and name in ("numpy", "array"))
    return is_used and (are_several or is_read) and number.partial not in STATISTICS


def log_of(number: SplitTensor) -> tuple[str, str]:
    """What is told of it, and the remedy."""
    if number.partial in STATISTICS:
        return f"{number.partial} of", LOG_REMEDY
    return f"{number.partial} over", SUM_REMEDY


def meets_rows(call: Call, is_evaluation: bool) -> bool:
    """Whether a statistic comes to what is trained, or to rows of an evaluation (a steering vector)."""
    if is_evaluation and any(not x.partial for x in call.inputs):
        return True
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
