"""A program's hooks on the gradients of parameters, and what is called in their place for a while."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.nn import Parameter

from core.parallel_state.by_hand.functions import is_foreign

# a tensor's hooks, which one, what it was
Wrapped = tuple[dict, int, Callable]


def has_hooks(parameter: Parameter) -> bool:
    """Whether a program has hooks on its gradient, before or after it is `parameter.grad`."""
    return any(
        map(is_foreign, [hook for hooks in _registries(parameter) for hook in hooks.values()])
    )


def wrap_hooks(parameter: Parameter, around: Callable[..., Any]) -> list[Wrapped]:
    """Let `around(hook, given)` stand for each hook of the program's, until `unwrap_hooks`.

    given: the gradient of a `register_hook`, the parameter of a `register_post_accumulate_grad_hook`.
    """
    wrapped: list[Wrapped] = []
    for hooks in _registries(parameter):
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


def _registries(parameter: Parameter) -> tuple[dict, ...]:
    """Asked for each weight of a step: few calls."""
    before: dict | None = parameter._backward_hooks
    after: dict | None = parameter._post_accumulate_grad_hooks
    # an owner of `main_grad` has one, which is no program's
    if after and len(after) == 1 and getattr(parameter, "main_grad", None) is not None:
        after = None
    if before and after:
        return before, after
    return (before,) if before else (after,) if after else ()
