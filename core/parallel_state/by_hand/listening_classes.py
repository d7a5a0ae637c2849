"""The classes that parameters, and what is made of them, have while somebody listens to what is called on them."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from core.parallel_state.by_hand.functions import called_by_core
from core.parallel_state.by_hand.listened_tensor import gather_first
from core.parallel_state.by_hand.whole_dims import axes_of_parameter


class Listener(Protocol):
    """Who hears."""

    is_open: bool

    def called(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run `func`, which was called on a tensor of these classes."""
        ...

    def pickled(self, tensor: Tensor) -> None:
        """A program writes a tensor of these classes into a file, or sends it to another process."""
        ...

    def add(self, parameters: Iterable[Parameter]) -> None:
        """Listen to these as well."""
        ...

    def make_plain_later(self, tensor: Tensor) -> None:
        """A tensor of these classes was made, which is given its own back when nobody listens."""
        ...


class Reporter:
    """Who hears what is called on tensors of two classes, now."""

    def __init__(self) -> None:
        self.listener: Callable[[], Listener | None] = lambda: None
        # whether the program compiles anything: only then is it asked, which costs two calls
        self.compiles = False
        # what the program is given of a call, where sizes are followed
        self.sizes: Callable[..., Any] | None = None
        # of parameters and of results
        self.classes: tuple[type[Parameter], type[Tensor]] | None = None


def run_plain(func: Any, args: tuple, kwargs: dict) -> Any:
    """`func`, where nobody listens: inside of `DisableTorchFunctionSubclass`."""
    # torch formats numbers of its own class only
    if func is Tensor.__format__:
        return args[0].as_subclass(Tensor).__format__(*args[1:])
    return func(*args, **kwargs)


def make_plain(parameters: Iterable[Parameter]) -> set[Reporter]:
    """Nobody listens to these any more: for who takes them over, and gives them classes of its own. Who listened."""
    reporters = set()
    for parameter in parameters:
        if reporter := getattr(type(parameter), "reports_to", None):
            reporters.add(reporter)
            parameter.__class__ = Parameter
    return reporters


def listen_again(reporters: Iterable[Reporter], parameters: Iterable[Parameter]) -> None:
    """After that: to those that are still plain ones."""
    for reporter in reporters:
        if (listener := reporter.listener()) is not None and listener.is_open:
            listener.add(parameters)


def _detached_for_a_parameter(data: Tensor) -> Tensor:
    """`data.detach()` inside `Parameter(data)`, which wants a tensor of data's own class."""
    with torch._C.DisableTorchFunctionSubclass():
        result = data.detach()
    if isinstance(data, Parameter):
        make_plain([data])
    result.__class__ = type(data)
    if hasattr(data, "heard"):
        result.heard = data.heard  # type: ignore[attr-defined]
    return result


def listening_classes(reporter: Reporter) -> tuple[type[Parameter], type[Tensor]]:
    """The classes of parameters and of results that report to its listener; copies and files hold plain ones."""

    def called(
        cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if reporter.compiles and torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if len(types) > 1:
            gather_first(types, func, args, kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # zero_grad, say: two per parameter, so no further calls
        if caller.startswith(("torch.optim.", "core.")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        listener = reporter.listener()
        if func is Tensor.detach and caller == "torch.nn.parameter":
            parameter = _detached_for_a_parameter(args[0])
            if listener is not None:
                # closing makes it a plain one
                listener.make_plain_later(parameter)
            return parameter
        if listener is not None:
            result = listener.called(func, args, kwargs or {})
            if reporter.sizes is not None:
                return reporter.sizes(func, args, kwargs or {}, result)
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return run_plain(func, args, kwargs or {})

    def copied(self: Tensor, memo: dict) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            plain: Tensor = self.detach().clone()
        memo[id(self)] = copy = (
            Parameter(plain, self.requires_grad) if isinstance(self, Parameter) else plain
        )
        return copy

    def reduced(self: Tensor, protocol: Any) -> Any:
        listener = reporter.listener()
        if listener is not None and not called_by_core(sys._getframe(1)):
            listener.pickled(self)
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(self, Parameter):
                return Parameter.__reduce_ex__(self, protocol)
            return Tensor.__reduce_ex__(self.as_subclass(Tensor), protocol)

    shared = {
        "__torch_function__": classmethod(called),
        "__deepcopy__": copied,
        "__reduce_ex__": reduced,
        "__module__": __name__,
        "reports_to": reporter,
    }
    reporter.classes = (
        type("Parameter", (Parameter,), shared | {"axes": property(axes_of_parameter)}),
        type("Tensor", (Tensor,), shared),
    )
    return reporter.classes
