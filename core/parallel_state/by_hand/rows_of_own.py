"""Tells of a model of a program's own whose functions see a context rank's rows as if they were whole sequences."""

import sys
import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand.as_written import run_as_written
from core.parallel_state.by_hand.functions import called_by_core, function_name
from core.parallel_state.modules import Modules, modules_of

# whatever their arguments: in these each row of a sequence meets others
_MEET = frozenset(("scaled_dot_product_attention", "multi_head_attention_forward"))
_MEET |= {"flex_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"}
# of the scores [..., s, s] of an attention by hand
_OF_SCORES = ("softmax", "log_softmax")


def knows_context(model: nn.Module) -> bool:
    """Whether it says, or a part of it, that its sequences lie over context ranks."""
    return any(vars(type(part)).get("knows_context") for part in model.modules())


class RowsOfOwn(TorchFunctionMode):
    """Around the first forward of a model that does not say so."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._told = False
        # sizes of what the model is given: that of a rank's rows is among them
        self._sizes: set[int] = set()
        self._handles: list[Any] = []
        self._eager = ExitStack()

    def watch(self, model: nn.Module) -> None:
        """Until it has run once."""
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._sizes = {size for x in given for size in x.shape}
        if not self._handles or torch.compiler.is_compiling():
            return
        # of compiled code that must stay so nothing is seen
        if run_as_written(module, given, self._eager):
            self._eager.enter_context(self)

    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._handles and not torch.compiler.is_compiling():
            self._eager.close()
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _sees_rows(self, name: str, args: tuple, result: Any) -> bool:
        if name in _OF_SCORES and isinstance(result, Tensor) and result.dim() > 2:
            return result.shape[-1] == result.shape[-2] and result.shape[-1] in self._sizes
        first = args[0] if args else None
        return name in _MEET and isinstance(first, Tensor) and bool(self._sizes & {*first.shape})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = function_name(func)
        if (
            not self._told
            and self._sees_rows(name, args, result)
            and not called_by_core(sys._getframe(1))
        ):
            self._told = True
            warnings.warn(
                f"{name} in a model of your own is given a context rank's rows, 1/{self._ranks} of each sequence, as "
                "if they were all: it attends to none of the others, and counts positions from its first row. "
                "core.context_parallel.context_attention attends to all (q, k, v: a rank's rows), position_ids "
                "of context_batch are the true positions; context_parallel_size=1 leaves sequences whole. If it is "
                "right, knows_context = True on the model's class says so",
                stacklevel=3,
            )
        return result


def watch_rows_of_own(modules: Modules, ranks: int) -> None:
    """Of each that does not say that it knows of context ranks, where there are several."""
    if ranks > 1:
        for model in modules_of(modules).values():
            if not knows_context(model):
                RowsOfOwn(ranks).watch(model)
