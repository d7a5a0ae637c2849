"""A program's hooks on the gradients of parameters, and what is called in their place for a while."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.nn import Parameter

from core.parallel_state.by_hand.functions import is_foreign

# a tensor's hooks, which one, what it was
Wrapped = tuple[dict, int, Callable]


def wrap_hooks(parameter: Parameter, around: Callable[..., Any]) -> list[Wrapped]:
    """Let `around(hook, gradient)` stand for each hook of the program's, until `unwrap_hooks`."""
    wrapped: list[Wrapped] = []
    hooks: dict = parameter._backward_hooks or {}
    for key, hook in hooks.items():
        if is_foreign(hook):
            wrapped.append((hooks, key, hook))
            hooks[key] = partial(around, hook)
    return wrapped


def unwrap_hooks(wrapped: Sequence[Wrapped]) -> None:
    """Put back those that were not removed meanwhile."""
    for hooks, key, hook in wrapped:
        if key in hooks:
            hooks[key] = hook
