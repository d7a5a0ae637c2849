"""Objects that replace a module's `forward`; several on one module are removed in any order."""

from collections.abc import Iterator
from typing import Any

from torch import nn


class LinearProxy:
    """Stands in for a module's `forward`. A method and not a closure: a copy of the model must run its own.

    replaced: the forward it stands in for, another proxy's; None for the class's own forward.
    is_compiled: whether it runs compiled code. moves_saved: whether it sends what the forward saves elsewhere.
    """

    is_compiled = False
    moves_saved = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # ours appear as the bound method `call`
        self.replaced = module.__dict__.get("forward")

    def call_replaced(self, *args: Any, **kwargs: Any) -> Any:
        """The forward without this object."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def install(self) -> None:
        """From now on this is the module's forward."""
        self.module.forward = self.call

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward now."""
        return self.call_replaced(*args, **kwargs)

    def remove(self) -> None:
        """Restore what was replaced, also from under other proxies; under a foreign wrapper it stays."""
        chain = list(proxies_of(self.module))
        if self not in chain:
            return
        if chain[0] is not self:
            chain[chain.index(self) - 1].replaced = self.replaced
        elif self.replaced is not None:
            self.module.forward = self.replaced
        else:
            del self.module.forward


def has_compiled_code(module: nn.Module) -> bool:
    """Whether this module itself, not its children, is compiled by torch or runs a compiled forward."""
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return True
    return "forward" in module.__dict__ and any(proxy.is_compiled for proxy in proxies_of(module))


def proxies_of(module: nn.Module) -> Iterator[LinearProxy]:
    """Our proxies on a module's forward, the outermost first."""
    proxy = getattr(module.__dict__.get("forward"), "__self__", None)
    while isinstance(proxy, LinearProxy):
        yield proxy
        proxy = getattr(proxy.replaced, "__self__", None)
