"""Follows hidden states that a program's hooks take out of a model whose rows lie over context ranks.

`layer.register_forward_hook` gives a program this rank's rows, [s/cp, b, h]: pooled over dim 0 they are a rank's
part. Only modules with such hooks are looked at, and only in the forwards that `RowSums` follows.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.context_parallel.rows.gradients import GradientRows, axes_of_rows
from core.parallel_state.by_hand import is_foreign
from core.parallel_state.by_hand.as_written import is_compiled


class HookedRows:
    """Hooks of ours before the program's, for one forward."""

    def __init__(self, gradients: GradientRows) -> None:
        self._handles: list[Any] = []
        self.gradients = gradients

    def attach(
        self, model: nn.Module, shares: Collection[int], follow: Callable[[Tensor], None]
    ) -> None:
        """Call `follow` with the [rows, b, h] that hooks in `model` will be given; nothing where a part is compiled.

        shares: how many rows there may be; sequence parallelism cuts them once more.
        """
        self.detach()
        if is_compiled(model):
            return
        parts = [part for part in model.modules() if part is not model]

        def mark(values: Any) -> None:
            for x in pytree.tree_leaves(values):
                # of a forward without gradients whatever hooks get; of another what trains
                is_looked_at = type(x) is Tensor and x.requires_grad == torch.is_grad_enabled()
                if is_looked_at and x.dim() == 3 and len(x) in shares:
                    follow(x)

        for part in parts:
            hooks = (*part._backward_hooks.values(), *part._backward_pre_hooks.values())
            if any(map(is_foreign, hooks)):
                self._listen_backward(part, shares)
            if any(map(is_foreign, part._forward_hooks.values())):
                self._handles.append(
                    part.register_forward_hook(lambda _, __, output: mark(output), prepend=True)
                )
            if any(map(is_foreign, part._forward_pre_hooks.values())):
                self._handles.append(
                    part.register_forward_pre_hook(lambda _, inputs: mark(inputs), prepend=True)
                )

    @staticmethod
    def has_hooks(model: nn.Module) -> bool:
        """Whether a program's hooks are given what its parts take or return."""
        return any(
            is_foreign(hook)
            for part in model.modules()
            if part is not model and (part._forward_hooks or part._forward_pre_hooks)
            for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        )

    def _listen_backward(self, part: nn.Module, shares: Collection[int]) -> None:
        """Around the program's hooks that get gradients: torch keeps the hooks of a forward for its backward."""

        def begin(_: nn.Module, *gradients: Any) -> None:
            for x in pytree.tree_leaves(gradients):
                if type(x) is Tensor and x.dim() == 3 and len(x) in shares:
                    self.gradients.begin((x,), axes_of_rows(x, 0))

        def end(_: nn.Module, gradients: Any, *rest: Any) -> None:
            self.gradients.end()

        for register in (part.register_full_backward_pre_hook, part.register_full_backward_hook):
            self._handles += [register(begin, prepend=True), register(end)]

    def detach(self) -> None:
        """Take them out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
