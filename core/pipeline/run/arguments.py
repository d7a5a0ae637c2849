"""The names by which a stage's forward takes what it is given of a batch."""

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ForwardArguments(tuple[str, ...]):
    """These names. Of a forward with `**kwargs`, which takes any: tells of entries that it would look for in them."""

    # the module, until its first microbatch
    looks_in: nn.Module | None = None
    takes_any: bool = False

    def look(self, entries: Iterable[Any]) -> None:
        """Once: warn of a batch's entries that the forward reads out of `**kwargs`, or hands on to a part that names
        them. It is given those alone that it names itself."""
        module, self.looks_in = self.looks_in, None
        if module is None:
            return
        left = [entry for entry in entries if isinstance(entry, str) and entry not in self]
        code = getattr(getattr(module.forward, "__func__", None), "__code__", None)
        constants = code.co_consts if code is not None else ()
        parts = [part for part in module.modules() if part is not module]
        missed = [
            entry
            for entry in left
            if entry in constants
            # those are a loss's, beside it
            or (entry != "labels" and any(entry in _names(part) for part in parts))
        ]
        if missed:
            warnings.warn(
                f"{type(module).__name__}.forward takes **kwargs, in which there is nothing of the batch: a stage is "
                f"given the entries that its forward names, not {', '.join(missed)}. Write "
                f"forward(..., {missed[0]}=None, **kwargs)",
                stacklevel=2,
            )


def _names(module: nn.Module) -> tuple[str, ...]:
    try:
        return _named(inspect.signature(module.forward))
    except (TypeError, ValueError):  # of a forward in C nothing is known
        return ()


def _named(signature: inspect.Signature) -> tuple[str, ...]:
    return tuple(p.name for p in signature.parameters.values() if p.kind in _NAMED)


def forward_arguments(module: nn.Module) -> ForwardArguments:
    """Of `module.forward`; of the wrapped one for a compiled or DDP module."""
    # a ScriptModule's forward has no Python signature, but a schema, whose argument 0 is self
    if isinstance(module, torch.jit.ScriptModule):
        arguments = module.forward.schema.arguments[1:]  # type: ignore[attr-defined]
        return ForwardArguments(argument.name for argument in arguments)
    signature = inspect.signature(module.forward)
    names = ForwardArguments(_named(signature))
    # torch.compile and DDP wrap the module, and take whatever it takes: (*args, **kwargs)
    wrapped = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
    if not names and isinstance(wrapped, nn.Module):
        return forward_arguments(wrapped)
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        names.looks_in = module
        names.takes_any = True
    return names
