"""Who is called around the steps of all optimizers of this process.

torch walks through its registry of hooks while it calls them: an entry that leaves meanwhile, with an object that
Python's collector takes, ends the step by an error. So there is one entry, for good, which holds who listens weakly.
"""

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# a bound method: (optimizer, the step's arguments with the optimizer first, its keywords)
StepMethod = Callable[[Optimizer, Any, Any], None]


class StepListener:
    """One who is called, until `remove`, or until the object of the method is gone."""

    def __init__(self, method: StepMethod, listeners: "list[StepListener]") -> None:
        self.method = weakref.WeakMethod(method)
        self._listeners = listeners
        listeners.append(self)

    def remove(self) -> None:
        """Nothing is called any more; twice is once."""
        if self in self._listeners:
            self._listeners.remove(self)


class _Registry:
    def __init__(self) -> None:
        self.before: list[StepListener] = []
        self.after: list[StepListener] = []
        register_optimizer_step_pre_hook(partial(_call, self.before))
        register_optimizer_step_post_hook(partial(_call, self.after))


def _call(listeners: list[StepListener], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # a copy: who is called may come and go
    for listener in tuple(listeners):
        if (method := listener.method()) is not None:
            method(optimizer, args, kwargs)
        else:
            listener.remove()


@cache
def _registry() -> _Registry:
    return _Registry()


def before_optimizer_steps(method: StepMethod) -> StepListener:
    """Call a bound method before each step; its object is held weakly."""
    return StepListener(method, _registry().before)


def after_optimizer_steps(method: StepMethod) -> StepListener:
    """Call a bound method after each step that raised nothing; its object is held weakly."""
    return StepListener(method, _registry().after)
