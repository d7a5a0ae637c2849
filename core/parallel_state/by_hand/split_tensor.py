"""A tensor of which other ranks hold parts, and who hears what a program does with it.

The class is given and taken back by assignment: no tensor is made, no value and no graph changes.
"""

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.functions import (
    called_by_core,
    called_by_torch_module,
    function_name,
)
from core.parallel_state.by_hand.listened_tensor import ListenedTensor, gather_first, unmark
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_flex import score_functions

# how a tensor is marked whose functions are called once more on whole sequences, and of which nothing else is known
REPEATED = "repeated"
# `x *= y`
_ASSIGNMENT_NAMES = "setitem iadd isub imul itruediv iand ior ixor idiv ipow ifloordiv imod"
_ASSIGNMENTS = frozenset(_ASSIGNMENT_NAMES.split())
_BACKWARD = (Tensor.backward, torch.autograd.grad, torch.autograd.backward)


class SplitTensor(ListenedTensor):
    """A tensor whose dims are split as `axes` says; or a sum of one, which is not yet summed over the ranks."""

    axes: Axes
    partial: str  # the function that made a rank's part of a sum; "" where it is no such sum
    seen_by: "weakref.ref[Follower]"
    # of what is made of a batch's rows: the sums in it, None where they are of no use; its values when it was made
    numbers: tuple[Tensor, ...] | None
    counted: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:
            return _run_backward(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            # our own layers know what a part is; only the program's use is judged
            if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
                return func(*args, **kwargs)
            if len(types) > 1:
                gather_first(types, func, args, kwargs)
            frame = sys._getframe(1)
            if called_by_core(frame) and not _is_heard(args, frame):
                if function_name(func) == "all_reduce":
                    unmark(args[0])  # it is of all ranks now
                return func(*args, **kwargs)
            inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, SplitTensor)]
            # beside what a teacher made, whose follower waits for no backward
            source = next((x for x in inputs if x.requires_grad), inputs[0] if inputs else None)
            seen_by = source.seen_by() if source is not None else None
            if seen_by is None or torch._C._are_functorch_transforms_active():
                return func(*args, **kwargs)
            name = function_name(func)
            # the gradient that a hook gets is split as its tensor: what the hook does with it is followed, too
            if name == "register_hook" and inputs[0] is args[0] and len(args) == 2:
                return func(args[0], seen_by.listening(args[1], inputs[0].axes))
            seen_by.check(name, args, kwargs)
            result = func(*args, **kwargs)
            if name == "size" and (functions := score_functions(frame, inputs[0])) is not None:
                seen_by.attends(inputs[0], functions)
            if name in ("shape", "size", "numel", "nelement"):
                return seen_by.sizes(args, kwargs, result)
            seen_by.hear(Call(func, name, inputs, args, kwargs, result))
            if name in ("item", "tolist"):
                return seen_by.numbers(inputs[0], result)
        return result

    def __format__(self, spec: str) -> str:
        self._is_read("format")
        return super().__format__(spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        self._is_read("repr")
        return super().__repr__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._is_read("a file")
        return super().__reduce_ex__(protocol)

    def _is_read(self, name: str) -> None:
        if (follower := self.seen_by()) is not None:
            follower.read(name, self)


def _run_backward(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A backward from what is followed: hooks in it hear what they are given."""
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, SplitTensor)]
    follower = inputs[0].seen_by()
    name = function_name(func)
    classes = [type(x) for x in inputs]
    is_heard = follower is not None and not called_by_core(sys._getframe(2))
    if follower is not None and is_heard:
        follower.check(name, args, kwargs)
    try:
        for x in inputs:
            x.__class__ = Tensor  # type: ignore[assignment]
        result = func(*args, **kwargs)
    finally:
        for x, kind in zip(inputs, classes, strict=True):
            x.__class__ = kind
    if follower is not None and is_heard:
        follower.hear(Call(func, name, inputs, args, kwargs, result))
    return result


def _is_heard(args: tuple, frame: Any) -> bool:
    """Whether a module of torch's, which our code called, is one that the follower judges."""
    first = next((x for x in args if isinstance(x, SplitTensor)), None)
    follower = first.seen_by() if first is not None else None
    return follower is not None and follower.hears_modules and called_by_torch_module(frame)


class SplitParameter(SplitTensor, Parameter):
    """A parameter that is followed while a program's own forward may read it."""


@dataclass(slots=True)
class Call:
    """A function that a program called on what is followed, and what it returned.

    inputs: the tensors among its arguments that are followed.
    """

    func: Any
    name: str
    inputs: list[SplitTensor]
    args: tuple
    kwargs: dict[str, Any]
    result: Any

    @property
    def writes(self) -> bool:
        """Whether it writes into its first argument."""
        name = getattr(self.func, "__name__", "")
        is_method = name.endswith("_") and not name.endswith("__")
        return is_method or name == "__set__" or self.name in _ASSIGNMENTS


def is_turn(calls: int) -> bool:
    """Whether this one of many is followed: the first, and then multiples of no period that a program would have."""
    return calls < 17 or calls % 17 == 0


class Follower:
    """Marks tensors, and is called with what a program does to them."""

    # also with what torch's modules do that our code calls
    hears_modules = False

    def __init__(self) -> None:
        self._marked: list[weakref.ref[Tensor]] = []

    def mark(self, tensor: Any, axes: Axes | None, partial: str = "") -> None:
        """Follow `tensor`; nothing where it is no plain one, or nothing of it is split."""
        if type(tensor) is not Tensor or not (
            partial or (axes is not None and split_axes.is_split(axes))
        ):
            return
        # by assignment: views, graph and identity stay
        tensor.__class__ = SplitTensor
        tensor.axes = axes if axes is not None else ()  # type: ignore[attr-defined]
        tensor.partial = partial  # type: ignore[attr-defined]
        tensor.seen_by = weakref.ref(self)  # type: ignore[attr-defined]
        self._marked.append(weakref.ref(tensor))

    def mark_parameter(self, parameter: Parameter, axes: Axes) -> None:
        """Follow it; nothing where it has another class (FSDP2's, freed ones) or is followed already."""
        if type(parameter) is Parameter:
            parameter.__class__ = SplitParameter
            parameter.axes = axes  # type: ignore[attr-defined]
            parameter.partial = ""  # type: ignore[attr-defined]
            parameter.seen_by = weakref.ref(self)  # type: ignore[attr-defined]
            self._marked.append(weakref.ref(parameter))

    def make_plain(self) -> None:
        """Nobody looks at what was marked any more."""
        for reference in self._marked:
            tensor = reference()
            if type(tensor) is SplitTensor:
                unmark(tensor)
            elif type(tensor) is SplitParameter:
                unmark(tensor, Parameter)
        self._marked = []

    def forget_dead(self) -> None:
        """Who is never asked to `make_plain` keeps no references to tensors that are gone."""
        self._marked = [reference for reference in self._marked if reference() is not None]

    def listening(self, hook: Any, axes: Axes) -> Any:
        """What is registered in the place of `hook` on the gradient of what is split as `axes` says."""
        return hook

    def sizes(self, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """What the program is given of `x.shape` or `x.size(dim)` of what is followed."""
        return result

    def attends(self, query: SplitTensor, functions: Mapping[str, Callable[..., Any]]) -> None:
        """FlexAttention is called with `query` and these functions of scores and masks."""

    def numbers(self, tensor: SplitTensor, result: Any) -> Any:
        """What the program is given of `tensor.item()` or `tensor.tolist()`."""
        return result

    def read(self, name: str, tensor: SplitTensor) -> None:
        """A text is made of what is followed."""

    def returned(self, loss: SplitTensor, count: Any) -> None:
        """An executor was given `loss`, which is followed, and by what it divides the losses of all ranks."""

    def check(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before a function is called on what is followed. Raises ValueError: it would fail in other words."""

    def hear(self, call: Call) -> None:
        """After it; what is only repeated, which nobody does here, is plain from now on."""
        for x in call.inputs:
            if x.partial == REPEATED:
                unmark(x)
        self.follow(replace(call, inputs=[x for x in call.inputs if isinstance(x, SplitTensor)]))

    def follow(self, call: Call) -> None:
        """After it: tell what it did wrong, mark what it returned."""
        raise NotImplementedError
