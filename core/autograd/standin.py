"""Objects that take the place of a module's `forward`, several on one module, taken back in any order."""

from collections.abc import Iterator
from typing import Any

from torch import nn


class LinearProxy:
    """Stands in for a module's `forward`. A method and not a closure: a copy of the model must run its own.

    below: what it stands in for, another's stand-in; None for the class's own forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.below = module.__dict__.get("forward")  # ours appear as the bound method `call`

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The forward without this object."""
        if self.below is not None:
            return self.below(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def put(self) -> None:
        """From now on this is the module's forward."""
        self.module.forward = self.call

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward now."""
        return self.plain(*args, **kwargs)

    def remove(self) -> None:
        """Give back what was there, also from under other stand-ins; under somebody else's wrapper it stays."""
        chain = list(standins(self.module))
        if self not in chain:
            return
        if chain[0] is not self:
            chain[chain.index(self) - 1].below = self.below
        elif self.below is not None:
            self.module.forward = self.below
        else:
            del self.module.forward


def standins(module: nn.Module) -> Iterator[LinearProxy]:
    """The stand-ins of a module, the outermost first, as far as they are ours."""
    found = getattr(module.__dict__.get("forward"), "__self__", None)
    while isinstance(found, LinearProxy):
        yield found
        found = getattr(found.below, "__self__", None)
