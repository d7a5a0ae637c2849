"""Detects a masked loss that a context rank divides by the tokens of its own rows.

`(losses * mask).sum() / mask.sum()` is the mean of the rows at hand. Context ranks whose rows have other numbers of
tokens would weigh them differently than one process does. So `context_batch` gives such ranks a mask that follows its
sum until it is divided by, or summed over the ranks. Everything else that a program does with it gives plain tensors.
"""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from core.parallel_state.by_hand.functions import called_by_program, function_name

_COUNTS = ("sum", "count_nonzero")
_DIVISIONS = ("div", "truediv", "true_divide", "itruediv", "idiv")
_DTYPES = ("float", "double", "half", "bfloat16", "long", "int", "bool", "to", "type")
_ELEMENTWISE = (*_DTYPES, "view", "reshape", "flatten", "contiguous", "clone", "detach")
_BOUNDED = ("clamp", "clip", "clamp_min", "maximum", "max", "add")  # `mask.sum().clamp(min=1)`, `mask.sum() + 1e-8`


class RowsMask(Tensor):
    """The loss mask of a context rank's rows, [b, s/cp], where other ranks' have other numbers of tokens."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if type(result) is not Tensor or not args or not called_by_program(sys._getframe(1)):
                return result
            name = function_name(func)
            if isinstance(args[0], RowsMask):
                if name in _COUNTS and result.dim() == 0:
                    return _followed(result)
                if name in _ELEMENTWISE or name in ("gt", "ne"):
                    return result.as_subclass(RowsMask)
            elif name in ("getitem", "masked_select") and result.requires_grad and result.dim() == 1:
                return result.as_subclass(SelectedLosses)  # losses[mask.bool()]
            return result


class OwnTokens(Tensor):
    """How many tokens a context rank's own rows have, []; `counted`: before anybody summed it over the ranks."""

    counted: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            name = function_name(func)
            if name == "all_reduce":  # in place, and nobody's own any more
                for value in args:
                    if isinstance(value, OwnTokens):
                        value.counted = torch.full_like(value.counted, -1)  # which no count equals
            elif type(result) is Tensor and args and called_by_program(sys._getframe(1)):
                by_own = len(args) > 1 and isinstance(args[1], OwnTokens) and torch.equal(args[1], args[1].counted)
                if name in _DIVISIONS and by_own and result.requires_grad:
                    _tell(f"divided by {args[1].tolist():g}, the tokens of this context rank's own rows")
                is_own = isinstance(args[0], OwnTokens) and (name in _ELEMENTWISE or name in _BOUNDED)
                if is_own and result.dim() == 0 and torch.equal(args[0], args[0].counted):
                    return _followed(result)
            return result


class SelectedLosses(Tensor):
    """Losses of the tokens of this rank's own rows, [n]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function_name(func) == "mean" and called_by_program(sys._getframe(1)):
                _tell(f"the mean of {args[0].numel()}, the tokens of this context rank's own rows")
            return func(*args, **(kwargs or {}))


def listening_mask(mask: Tensor, counts: Tensor) -> Tensor:
    """`mask` [b, s/cp], followed if `counts` [cp], tokens of each context rank, are not all the same."""
    return mask if bool((counts == counts[0]).all()) else mask.as_subclass(RowsMask)


def _followed(count: Tensor) -> Tensor:
    result = count.as_subclass(OwnTokens)
    result.counted = count.clone()
    return result


def _tell(what: str) -> None:
    warnings.warn(
        f"context parallelism: a loss was {what}; other context ranks have other numbers of tokens, so tokens weigh "
        "differently than on one process. Divide the sum by the tokens of all ranks, summed first: "
        "n = loss_mask.sum(); all_reduce(n, group=parallel_state.get_data_parallel_group(with_context_parallel=True))"
        "; under DataParallel, which averages over that group, times its size; executors take (sum, loss_mask.sum())",
        stacklevel=3,
    )
