"""Notices an autograd function of a program's own that gives an auxiliary loss the gradient 1 (DeepSeek's
AddAuxiliaryLoss, Megatron's MoEAuxLossAutoScaler): where losses are sums, which tokens divide later, it is too small.
"""

import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.autograd.graph import nodes_behind
from core.parallel_state import ParallelState
from core.parallel_state.by_hand.functions import program_level


class OwnGradients:
    """Hooks on an executor's modules in its first two steps."""

    def __init__(self, modules: Iterable[nn.Module], ps: ParallelState) -> None:
        self._ranks = ps.size("dp-cp")
        self._steps = 0
        self._forwards = 0
        # name of a function -> gradients of one number that it made, a microbatch each
        self._made: dict[str, list[float]] = {}
        # of compiled ones guards are on hooks
        plain = [module for module in modules if not module._compiled_call_impl]
        self._hooks = [module.register_forward_hook(self._look) for module in plain]
        self._stages = max(len(self._hooks), 1)

    def close(self) -> None:
        """Nothing more is looked at."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def after_step(self, num_tokens: Tensor | float) -> None:
        """num_tokens: by which the step's gradients are divided."""
        if not self._hooks:
            return
        self._steps += 1
        same = [name for name, made in self._made.items() if len(made) > 1 and len({*made}) == 1]
        microbatches = self._forwards / self._stages * self._ranks / self._steps
        if same and float(num_tokens) > microbatches:
            warnings.warn(
                f"{same[0]}.backward gives a number the gradient {self._made[same[0]][0]:g} whatever the loss's is, "
                f"as an auxiliary loss. loss_fn returns sums, whose gradients are divided by {float(num_tokens):g} "
                "tokens, and so is this one. Multiply that loss by the tokens of its microbatch (the rows of its "
                "input), or let loss_fn return a mean and 1",
                stacklevel=program_level(),
            )
        if same or self._steps == 2:
            self.close()

    def _look(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._forwards += 1
        for node in _own_functions(output):
            name = f"{node._forward_cls.__module__}.{node._forward_cls.__qualname__}"
            scaled = [_is_scaled(following) for following, _ in node.next_functions]
            node.register_hook(partial(self._note, name, scaled))

    @torch.no_grad()
    def _note(self, name: str, scaled: list[bool], made: tuple, given: tuple) -> None:
        if any(g is not None and g.numel() == 1 for g in given):
            return
        for gradient, is_scaled in zip(made, scaled, strict=False):
            if gradient is not None and gradient.numel() == 1 and not is_scaled and gradient.any():
                self._made.setdefault(name, []).append(float(gradient))


def _is_scaled(node: Any) -> bool:
    """Whether an auxiliary loss was multiplied by a number above 1, its microbatch's tokens."""
    while type(node).__name__ in ("MulBackward0", "DivBackward0"):
        sides = [getattr(node, f"_saved_{side}", None) for side in ("self", "other")]
        if any(isinstance(x, Tensor) and x.numel() == 1 and float(x) > 1 for x in sides):
            return type(node).__name__ == "MulBackward0"
        node = next(
            (following for following, _ in node.next_functions if following is not None), None
        )
    return False


def _own_functions(output: Any) -> Iterator[Any]:
    """Nodes of a program's own functions in the graph of what a module returned."""
    for node in nodes_behind(
        x.grad_fn for x in pytree.tree_leaves(output) if isinstance(x, Tensor)
    ):
        own = getattr(node, "_forward_cls", None)
        if own is not None and not own.__module__.startswith(("core.", "torch.")):
            yield node
