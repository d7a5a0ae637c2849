"""Detects arithmetic that a program does by hand with weights and gradients of which other ranks hold the rest.

`p.norm()`, `p @ p.T`, `torch.randn_like(p)`, `p[0]`, `p.shape` call nothing of ours, raise nothing and silently use
one rank's shard. So between a model's forwards parameters get a class that sees which functions are called on them.
While the model runs and while an optimizer steps they are plain ones: nothing is slower there.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand.functions import (
    KIND_OF_FUNCTION,
    NEW_BUFFERS,
    called_by_program,
    function_name,
)
from core.parallel_state.by_hand.heard import WHOLE_NORM, Heard
from core.parallel_state.by_hand.numbers import of_parameter


def is_foreign(hook: Any) -> bool:
    """Whether a hook is a program's, not torch's or our own."""
    while isinstance(hook, partial):
        hook = hook.func
    return not getattr(hook, "__module__", type(hook).__module__).startswith(("core.", "torch."))


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


class ByHand:
    """Calls `report(Heard)` for the functions that a program calls on the parameters it was opened with.

    Elementwise functions, views and attributes are not reported. While an optimizer steps, parameters are plain.
    numbers: norms and counts of weights are followed until those of several are put together.
    """

    def __init__(
        self, report: Callable[[Heard], None], *, gradients: bool = False, numbers: bool = False
    ) -> None:
        self._report = report
        self._gradients = gradients
        self._numbers = numbers
        self.is_open = False
        self._parameters: list[Parameter] = []
        # where gradients lie in buckets: what hears of operators on them
        self._slots: list[Any] = []
        # results and gradients, to be given their own class back
        self._followed: list[weakref.ref[Tensor]] = []
        # a tensor's hooks, which one, what it was
        self._wrapped: list[tuple[dict, int, Callable]] = []
        self._parameter, self._result = _classes(self)
        # torch's hooks are of the process: they refer weakly, and go with this object
        before = register_optimizer_step_pre_hook(_weak_hook(self, ByHand._plain))
        after = register_optimizer_step_post_hook(_weak_hook(self, ByHand._listening))
        self._hooks = [weakref.finalize(self, hook.remove) for hook in (before, after)]

    def open(self, parameters: Iterable[Parameter]) -> None:
        """Listen to these; those of another class (FSDP2's, freed ones) are left alone."""
        self._parameters = []
        self.is_open = True
        self.add(parameters)

    def add(self, parameters: Iterable[Parameter]) -> None:
        """Listen to these as well."""
        for parameter in parameters:
            if self._gradients:
                self._listen_in_buckets(parameter)
            if type(parameter) is Parameter:
                self._parameters.append(parameter)
                if self._gradients and parameter._backward_hooks:
                    self._listen_in_hooks(parameter)
                parameter.__class__ = self._parameter

    def close(self) -> None:
        """Make all of them plain again."""
        self._plain()
        for hooks, key, hook in self._wrapped:
            if key in hooks:
                hooks[key] = hook
        for slot in self._slots:
            slot.listener = None
        self._wrapped, self._slots = [], []
        self._parameters = []
        self.is_open = False

    def end(self) -> None:
        """Close, and take torch's hooks out: nothing is listened to again."""
        self.close()
        for remove in self._hooks:
            remove()

    def pause_in_backward(self, gradient: Tensor) -> None:
        """A hook on what a backward begins with: until its end parameters are plain, and cost no Python calls."""
        for parameter in self._parameters:
            parameter.__class__ = Parameter
        torch.autograd.Variable._execution_engine.queue_callback(self._listening)

    def _listening(self) -> None:
        for parameter in self._parameters:
            if type(parameter) is Parameter:
                parameter.__class__ = self._parameter

    def _plain(self) -> None:
        for parameter in self._parameters:
            if type(parameter) is self._parameter:
                parameter.__class__ = Parameter
        self._plain_results()

    def _plain_results(self) -> None:
        for reference in self._followed:
            if type(tensor := reference()) is self._result:
                if getattr(tensor, "_is_param", False):
                    tensor.__class__ = Parameter
                else:
                    tensor.__class__ = Tensor
        self._followed = []

    def _listen_in_buckets(self, parameter: Parameter) -> None:
        """Hear of operators on a gradient that lies in buckets, of a freed parameter (ZeRO stage 3) as well."""
        slot: Any = getattr(getattr(parameter, "take_main_grad", None), "__self__", None)
        # of the program's own buckets nothing is known; where it is not None, another listens already
        if hasattr(slot, "listener") and slot.listener is None:
            slot.listener = partial(_called_inside, weakref.ref(self), Heard(parameter, True))
            self._slots.append(slot)

    def _listen_in_hooks(self, parameter: Parameter) -> None:
        """`register_hook` gives a program's function the gradient before it is `parameter.grad`."""

        def listened(hook: Callable, gradient: Tensor) -> Any:
            outer_followed = self._followed
            self._followed = []
            self._follow(gradient, Heard(parameter, True))
            try:
                return hook(gradient)
            finally:
                self._plain_results()
                self._followed = outer_followed

        hooks: dict = parameter._backward_hooks or {}
        for key, hook in hooks.items():
            if is_foreign(hook):
                self._wrapped.append((hooks, key, hook))
                hooks[key] = partial(listened, hook)

    def called(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run `func` on plain tensors; what is elementwise stays listened to."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            caller = sys._getframe(2)
            if not self.is_open or not called_by_program(caller):
                return result
            name = function_name(func)
            # None: elementwise, a view, a fact
            kind = KIND_OF_FUNCTION.get(name)
            # vector_to_parameters cuts by sizes what parameters_to_vector joined: right
            if kind in ("shape", "index") and caller.f_globals.get("__name__", "").startswith(
                "torch.nn.utils."
            ):
                return result
            source, tensor = self._listened((*args, *kwargs.values()))
            if func is torch.autograd.grad:
                self._follow_gradients(result, args[1] if len(args) > 1 else kwargs["inputs"])
                return result
            if name == "grad":
                if self._gradients and type(result) is Tensor:
                    self._follow(result, Heard(source.parameter, True))
                return result
            if name == "all_reduce":
                self._report(replace(source, kind="sum", name=name, group=kwargs.get("group")))
            if kind is not None:
                on_list = name.startswith("foreach")
                self._report(replace(source, kind=kind, name=name, joined=source.joined or on_list))
            if self._numbers and not source.of_gradient:
                followed = self._follow_number(
                    source, name, kind, result, (*args, *kwargs.values())
                )
                if followed is not None:
                    return followed
            joins = name in ("cat", "stack", "hstack", "vstack", "concat")
            source = replace(source, joined=source.joined or joins)
            if (
                kind is None
                and type(result) is Tensor
                and (joins or result.numel() == tensor.numel())
            ):
                self._follow(result, source, for_good=name in NEW_BUFFERS)
        return result

    def _follow_gradients(self, gradients: tuple[Tensor | None, ...], inputs: Any) -> None:
        """Results of `torch.autograd.grad`, in the order of its inputs."""
        if isinstance(inputs, Tensor):
            inputs = [inputs]
        for gradient, parameter in zip(gradients, inputs, strict=True):
            if (
                self._gradients
                and type(gradient) is Tensor
                and isinstance(parameter, self._parameter)
            ):
                self._follow(gradient, Heard(parameter, True))

    def heard_inside(self, source: Heard, func: Any, result: Any, norm_of: int | None) -> None:
        """A function of aten on a gradient that lies in buckets; norm_of: as in `_called_inside`."""
        name = func.overloadpacket.__name__.removeprefix("linalg_").strip("_")
        if norm_of is not None:
            self._report(replace(source, kind=WHOLE_NORM, name=name, joined=norm_of > 1))
        elif name in KIND_OF_FUNCTION:
            self._report(replace(source, kind=KIND_OF_FUNCTION[name], name=name))
        elif type(result) is Tensor and result.shape == source.parameter.shape:
            self._follow(result, source)

    def _follow_number(
        self, source: Heard, name: str, kind: str | None, result: Any, values: tuple
    ) -> Any:
        """What stands for `result`, a number of one weight or of its norm; None if it is nothing of the kind."""
        if source.reduced:
            leaves = pytree.tree_leaves(values)
            sources = [x.heard for x in leaves if isinstance(x, self._result)]  # type: ignore[attr-defined]
            meets = any(
                other.reduced and other.parameter is not source.parameter for other in sources
            )
            # the gradient of a sum is each stage's own: a penalty that calls backward on every rank is right
            is_penalty = name in ("add", "iadd") and getattr(result, "requires_grad", False)
            if meets and not is_penalty:
                self._report(replace(source, kind="combined", name=source.reduced))
        is_count = kind == "shape" and type(result) is int and name in ("numel", "nelement")
        # not of `float(...)`: Python makes a plain number of whatever it is given back
        if is_count or (source.reduced and name == "item"):
            combined = replace(source, kind="combined", name=source.reduced or name)
            return of_parameter(result, source.parameter, partial(self._report, combined))
        if kind == "reduction" and type(result) is Tensor and not source.joined:
            self._follow(result, replace(source, reduced=source.reduced or name))
            return result
        return None

    def _listened(self, values: Iterable[Any]) -> tuple[Heard, Tensor]:
        for value in values:
            if isinstance(value, self._parameter):
                return Heard(value, False), value
            if isinstance(value, self._result):
                return value.heard, value  # type: ignore[attr-defined]
            if isinstance(value, (list, tuple)) and any(
                isinstance(value, (self._parameter, self._result)) for value in value
            ):
                return self._listened(value)
        raise AssertionError("called without a tensor of these classes")

    def _follow(self, result: Tensor, source: Heard, *, for_good: bool = False) -> None:
        """Listen to what is called on `result`, too; for_good: beyond the next forward."""
        # bool: a mask that is counted
        if result.is_floating_point() or result.dtype is torch.bool:
            result.__class__ = self._result
            result.heard = source  # type: ignore[attr-defined]
            if not for_good:
                self._followed.append(weakref.ref(result))


def _called_inside(
    reference: "weakref.ref[ByHand]",
    source: Heard,
    func: Any,
    result: Any,
    *,
    norm_of: int | None = None,
) -> None:
    """A gradient that lies in buckets was given to an operator of aten.

    norm_of: the operator took norms, which are of full gradients, of so many parameters.
    """
    listener = reference()
    if listener is None or not listener.is_open or not called_by_program(sys._getframe(2)):
        return
    listener.heard_inside(source, func, result, norm_of)


def make_plain(parameters: Iterable[Parameter]) -> None:
    """Nobody listens to these any more: for who takes them over, and gives them classes of its own."""
    for parameter in parameters:
        if hasattr(type(parameter), "reports_to"):
            parameter.__class__ = Parameter


def _weak_hook(by_hand: ByHand, method: Callable[[ByHand], None]) -> Callable[..., None]:
    """A hook that does not keep `by_hand` alive."""
    reference = weakref.ref(by_hand)

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (listener := reference()) is not None and listener.is_open:
            method(listener)

    return hook


def _classes(by_hand: ByHand) -> tuple[type[Parameter], type[Tensor]]:
    """The classes of parameters and of results that report to `by_hand`; copies and files hold plain ones."""
    reference = weakref.ref(by_hand)

    def called(
        cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # zero_grad, say: two per parameter, so no further calls
        if caller.startswith(("torch.optim.", "core.")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        listener = reference()
        if func is Tensor.detach and caller == "torch.nn.parameter":
            parameter = _detached_for_a_parameter(args[0])
            if listener is not None:
                # closing makes it a plain one
                listener._followed.append(weakref.ref(parameter))
            return parameter
        if listener is not None:
            return listener.called(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def copied(self: Tensor, memo: dict) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            plain: Tensor = self.detach().clone()
        memo[id(self)] = copy = (
            Parameter(plain, self.requires_grad) if isinstance(self, Parameter) else plain
        )
        return copy

    def reduced(self: Tensor, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.__reduce_ex__(self.as_subclass(Tensor), protocol)

    shared = {
        "__torch_function__": classmethod(called),
        "__deepcopy__": copied,
        "__module__": __name__,
    }
    shared["reports_to"] = reference
    return type("Parameter", (Parameter,), shared), type(
        "Tensor", (Tensor,), shared | {"__reduce_ex__": reduced}
    )
