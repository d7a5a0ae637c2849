"""Detects arithmetic that a program does by hand with weights and gradients of which other ranks hold the rest.

`p.norm()`, `p @ p.T`, `torch.randn_like(p)`, `p[0]`, `p.shape` call nothing of ours, raise nothing and silently use
one rank's shard. So between a model's forwards parameters get a class that sees which functions are called on them.
While the model runs and while an optimizer steps they are plain ones: nothing is slower there.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand.as_written import AsWritten, compiles
from core.parallel_state.by_hand.changes import heard_change
from core.parallel_state.by_hand.functions import (
    JOINS,
    NEW_BUFFERS,
    READS_OF_VALUE,
    called_by_program,
    function_name,
    is_foreign,
    kind_of_call,
)
from core.parallel_state.by_hand.heard import WHOLE_NORM, Heard
from core.parallel_state.by_hand.hooked import Wrapped, unwrap_hooks, wrap_hooks
from core.parallel_state.by_hand.inside import called_inside, keeps_all
from core.parallel_state.by_hand.listened_tensor import unmark
from core.parallel_state.by_hand.listening_classes import Reporter, listening_classes, run_plain
from core.parallel_state.by_hand.meetings import heard_meeting
from core.parallel_state.by_hand.numbers import of_parameter
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_functions import Followed
from core.parallel_state.by_hand.states import ListenedStates
from core.parallel_state.by_hand.whole_dims import are_rows_of_a_product, result_of
from core.parallel_state.optimizer_steps import after_optimizer_steps, before_optimizer_steps


class ByHand:
    """Calls `report(Heard)` for the functions that a program calls on the parameters it was opened with.

    Elementwise functions, views and attributes are not reported, but for changes of gradients. While an optimizer of
    torch's or ours steps, parameters are plain.
    numbers: norms and counts of weights are followed until those of several are put together; while an optimizer of
    the program's own steps, those of gradients too, and nothing else is reported. buffers: what is made like a
    parameter (`zeros_like`) is followed for good. states: so are, between steps, the states of torch's optimizers.
    after: who listened before, to buffers that are followed for good.
    """

    def __init__(
        self,
        report: Callable[[Heard], None],
        *,
        gradients: bool = False,
        numbers: bool = False,
        buffers: bool = True,
        states: bool = False,
        after: "ByHand | None" = None,
    ) -> None:
        self._report = report
        self._gradients = gradients
        self._numbers = numbers
        self._buffers = buffers
        self.is_open = False
        # the optimizer whose step is under way, the outermost one; whether it is the program's own, and listened to
        self._stepping: int | None = None
        self._in_optimizer = False
        self._optimizer_steps = 0
        # what it has compiled would not trace tensors of classes of ours: eager meanwhile
        self._eager = AsWritten()
        self._parameters: list[Parameter] = []
        # where gradients lie in buckets: what hears of operators on them
        self._slots: list[Any] = []
        # results and gradients, to be given their own class back
        self._followed: list[weakref.ref[Tensor]] = []
        self._wrapped: list[Wrapped] = []
        self._reporter: Reporter = after._reporter if after is not None else Reporter()
        self._reporter.listener = weakref.ref(self)
        self._parameter, self._result = self._reporter.classes or listening_classes(self._reporter)
        self._states = ListenedStates(self._result, is_on=states)
        self._step_listeners = [before_optimizer_steps(self._before_optimizer)]
        self._step_listeners += [after_optimizer_steps(self._after_optimizer)]

    def follow_sizes(self, sizes: Callable[..., Any]) -> None:
        """Let `sizes(func, args, kwargs, result)` say what the program is given of each call."""
        self._reporter.sizes = sizes

    def open(self, parameters: Iterable[Parameter]) -> None:
        """Listen to these; those of another class (FSDP2's, freed ones) are left alone."""
        self._parameters, self.is_open, self._reporter.compiles = [], True, compiles()
        self.add(parameters)
        self._states.listen_again()

    def add(self, parameters: Iterable[Parameter]) -> None:
        """Listen to these as well."""
        for parameter in parameters:
            if self._gradients:
                self._listen_in_buckets(parameter)
                # of one that ZeRO stage 3 has freed as well; asked for every weight of a step: without a call
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    self._wrapped += wrap_hooks(parameter, partial(self._run_hook, parameter))
            if type(parameter) is Parameter:
                self._parameters.append(parameter)
                parameter.__class__ = self._parameter

    def open_for_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Listen to the gradients that these have now; the parameters stay plain, for forwards in between."""
        self._parameters, self.is_open = [], True
        for parameter in parameters:
            self._listen_in_buckets(parameter)
            gradient = parameter.grad
            if type(gradient) is Tensor:
                self._follow(gradient, Heard(parameter, True))

    def open_for_hooks(self, parameters: Iterable[Parameter]) -> bool:
        """Listen to what a program's hooks on the gradients of these do; whether there are any. All stay plain."""
        self._parameters, self.is_open = [], True
        for parameter in parameters:
            self._wrapped += wrap_hooks(parameter, partial(self._run_hook, parameter))
        return bool(self._wrapped)

    def close(self) -> None:
        """Make all of them plain again."""
        self._plain()
        # where a step of it ended by an exception
        self._eager.end()
        unwrap_hooks(self._wrapped)
        for slot in self._slots:
            slot.listener = None
        self._wrapped, self._slots, self._parameters = [], [], []
        self.is_open = False

    def end(self) -> None:
        """Close, and take torch's hooks out: nothing is listened to again."""
        self.close()
        for listener in self._step_listeners:
            listener.remove()

    def pause_in_backward(self, gradient: Tensor) -> None:
        """A hook on what a backward begins with: until its end parameters are plain, and cost no Python calls."""
        for parameter in self._parameters:
            parameter.__class__ = Parameter
        torch.autograd.Variable._execution_engine.queue_callback(self._listening)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # an optimizer around another, sharpness-aware, say, is the one that counts
        if not self.is_open or self._stepping not in (None, id(optimizer)):
            return
        self._stepping = id(optimizer)
        is_own = self._numbers and is_foreign(type(optimizer))
        self._optimizer_steps += is_own
        # its steps 1, 2, 4, 8 ...: an update costs many calls
        self._in_optimizer = is_own and not self._optimizer_steps & (self._optimizer_steps - 1)
        if self._in_optimizer:
            self._eager.hold()
        else:
            self._plain()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.is_open or self._stepping != id(optimizer):
            return
        self._stepping = None
        if self._in_optimizer:
            self._plain_results()
            self._in_optimizer = False
            self._eager.end()
        self._listening()
        if not hasattr(optimizer, "shard"):
            self._states.listen(optimizer, self._parameters)

    def _listening(self) -> None:
        for parameter in self._parameters:
            if type(parameter) is Parameter:
                parameter.__class__ = self._parameter

    def _plain(self) -> None:
        for parameter in self._parameters:
            if type(parameter) is self._parameter:
                parameter.__class__ = Parameter
        self._plain_results()
        self._states.make_plain()

    def make_plain_later(self, tensor: Tensor) -> None:
        """`tensor` has a class of ours, until nobody listens."""
        self._followed.append(weakref.ref(tensor))

    def _plain_results(self) -> None:
        for reference in self._followed:
            if type(tensor := reference()) is self._result:
                unmark(tensor, Parameter if getattr(tensor, "_is_param", False) else Tensor)
        self._followed = []

    def _listen_in_buckets(self, parameter: Parameter) -> None:
        """Hear of operators on a gradient that lies in buckets, of a freed parameter (ZeRO stage 3) as well."""
        slot: Any = getattr(getattr(parameter, "take_main_grad", None), "__self__", None)
        # of the program's own buckets nothing is known; where it is not None, another listens already
        if hasattr(slot, "listener") and slot.listener is None:
            slot.listener = partial(called_inside, weakref.ref(self), Heard(parameter, True))
            self._slots.append(slot)

    def _run_hook(self, parameter: Parameter, hook: Callable, given: Tensor) -> Any:
        """`register_hook` gives a program's function the gradient before it is `parameter.grad`."""
        outer_followed, self._followed = self._followed, []
        gradient = given.grad if given is parameter else given
        if type(gradient) is Tensor:
            self._follow(gradient, Heard(parameter, True))
        try:
            return hook(given)
        finally:
            self._plain_results()
            self._followed = outer_followed

    def called(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run `func` on plain tensors; what is elementwise stays listened to."""
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = run_plain(func, args, kwargs)
            except (RuntimeError, IndexError) as error:
                for heard, _ in self._listened((*args, *kwargs.values()))[:1]:
                    heard.explain(error, function_name(func))
                raise
            caller = sys._getframe(2)
            if not self.is_open or not called_by_program(caller):
                return result
            name = function_name(func)
            kind = kind_of_call(name, result)
            # vector_to_parameters cuts by sizes what parameters_to_vector joined: right
            if kind in ("shape", "index") and caller.f_globals.get("__name__", "").startswith(
                "torch.nn.utils."
            ):
                return result
            values = (*args, *kwargs.values())
            listened = self._listened(values)
            source, tensor = listened[0]
            sources = [heard for heard, _ in listened]
            if func is torch.autograd.grad:
                self._follow_gradients(result, args[1] if len(args) > 1 else kwargs["inputs"])
                return result
            if name == "grad":
                if self._gradients and type(result) is Tensor:
                    self._follow(result, Heard(source.parameter, True))
                return result
            if (met := heard_meeting(source, name, args, kwargs)) is not None:
                self._hear(met)
            on_list = name.startswith("foreach") and not self._in_optimizer
            made, wrong = result_of(source.parameter, func, name, args, kwargs, result)
            # of a name that is in no table, too
            kind = None if are_rows_of_a_product(kind, made) else kind or wrong
            if kind is not None:
                is_number = not isinstance(result, Tensor) or result.numel() == 1
                heard = replace(source, kind=kind, name=name, joined=source.joined or on_list)
                is_whole = kind == "reduction" and len(made) == 1 and made[0][1] is not None
                number = result if getattr(result, "requires_grad", False) else None
                heard = replace(heard, is_number=is_number, along_whole_dims=is_whole)
                self._hear(replace(heard, result=number))
            else:
                first = values[0][0] if isinstance(values[0], (list, tuple)) else values[0]
                is_first = first is tensor and source.of_gradient
                self._hear_change(func, sources, values, is_first, kwargs)
            if self._numbers and (self._in_optimizer or not source.of_gradient):
                followed = self._follow_number(sources, name, kind, result)
                if followed is not None:
                    return followed
            joins = name in JOINS
            # in a loop any that are put together are of several parameters
            several = not self._in_optimizer or len({id(s.parameter) for s in sources}) > 1
            source = replace(source, joined=source.joined or (joins and several))
            if kind is None:
                is_all = joins or (type(result) is Tensor and result.numel() == tensor.numel())
                self._follow_made(source, name, result, made, is_whole=is_all)
        return result

    def _follow_made(
        self, source: Heard, name: str, result: Any, made: Followed, *, is_whole: bool
    ) -> None:
        """is_whole: of all elements; made: what is known of the result's axes."""
        if type(result) is Tensor and is_whole:
            is_new_buffer = self._buffers and name in NEW_BUFFERS and not self._in_optimizer
            axes = made[0][1] if len(made) == 1 else None
            self._follow(result, source, for_good=is_new_buffer, axes=axes)
            return
        # other columns, or fewer, of the same rows
        for piece, its_axes in made:
            if type(piece) is Tensor:
                self._follow(piece, source, axes=its_axes)

    def pickled(self, tensor: Tensor) -> None:
        """A file, or a message, gets this rank's part."""
        if self.is_open:
            self._hear(replace(self._listened([tensor])[0][0], kind="file"))

    def _hear(self, heard: Heard) -> None:
        # an optimizer may take shapes, and norms of one parameter after the other: of several they are a model's
        if not self._in_optimizer or heard.joined or heard.kind == "combined":
            self._report(heard)

    def _hear_change(
        self, func: Any, sources: Sequence[Heard], values: Any, is_first: bool, kwargs: dict
    ) -> None:
        heard = heard_change(
            func, sources, values, is_first=is_first, alpha=kwargs.get("alpha", 1.0)
        )
        if heard is not None:
            self._hear(heard)

    def _follow_gradients(self, gradients: tuple[Tensor | None, ...], inputs: Any) -> None:
        """Results of `torch.autograd.grad`, in the order of its inputs."""
        inputs = [inputs] if isinstance(inputs, Tensor) else inputs
        for gradient, parameter in zip(gradients, inputs, strict=True):
            is_listened = self._gradients and isinstance(parameter, self._parameter)
            if is_listened and type(gradient) is Tensor:
                self._follow(gradient, Heard(parameter, True))

    def heard_inside(
        self, source: Heard, func: Any, result: Any, call: tuple, norm_of: int | None
    ) -> None:
        """A function of aten on a gradient that lies in buckets; call, norm_of: as in `called_inside`."""
        args, kwargs = call
        name = getattr(func, "overloadpacket", func).__name__.removeprefix("linalg_").strip("_")
        if (met := heard_meeting(source, name, args, kwargs)) is not None:
            self._hear(met)
        elif norm_of is not None:
            self._report(replace(source, kind=WHOLE_NORM, name=name, joined=norm_of > 1))
        elif (kind := kind_of_call(name, result)) is not None:
            (self._hear if kind == "shape" else self._report)(replace(source, kind=kind, name=name))
        else:
            # the program's own tensors are plain
            is_first = hasattr(args[0][0] if isinstance(args[0], list) else args[0], "slot")
            self._hear_change(func.overloadpacket, [source], args, is_first, kwargs)
            if type(result) is Tensor and (name in JOINS or keeps_all(args, result)):
                self._follow(result, replace(source, joined=source.joined or name in JOINS))

    def _follow_number(
        self, sources: Sequence[Heard], name: str, kind: str | None, result: Any
    ) -> Any:
        """What stands for `result`, a number of one weight or of its norm; None if it is nothing of the kind."""
        source = sources[0]
        if source.reduced:
            combined = replace(source, kind="combined", name=source.reduced)
            meets = len({id(other.parameter) for other in sources if other.reduced}) > 1
            # the gradient of a sum is each stage's own: a penalty that calls backward on every rank is right
            is_penalty = name in ("add", "iadd") and getattr(result, "requires_grad", False)
            if meets and is_penalty:
                source = replace(source, is_penalty=True)
                self._follow(result, source)
                return result
            if meets or (source.is_penalty and name in READS_OF_VALUE):
                self._hear(combined)
            elif name == "float":
                # Python makes a plain number of whatever it is given back
                self._hear(replace(source, kind="taken", name=name))
        is_count = kind == "shape" and type(result) is int and name in ("numel", "nelement")
        if is_count or (source.reduced and name == "item" and type(result) is not bool):
            combined = replace(source, kind="combined", name=source.reduced or name)
            return of_parameter(result, source.parameter, partial(self._hear, combined))
        if kind != "reduction" or source.joined:
            return None
        if type(result) is Tensor:
            self._follow(result, replace(source, reduced=source.reduced or name))
            return result
        if name.startswith("foreach") and len(result) == len(sources):
            for number, its_source in zip(result, sources, strict=True):
                self._follow(number, replace(its_source, reduced=name))
            return result
        return None

    def _listened(self, values: Iterable[Any]) -> list[tuple[Heard, Tensor]]:
        """The tensors of these classes that a function was given, in order, and whose values they are."""
        listened: list[tuple[Heard, Tensor]] = []
        for leaf in pytree.tree_leaves(values):
            if isinstance(leaf, self._parameter):
                listened.append((Heard(leaf, False), leaf))
            elif isinstance(leaf, self._result):
                listened.append((leaf.heard, leaf))  # type: ignore[attr-defined]
            elif self._gradients and hasattr(type(leaf), "slot"):
                listened.append((Heard(leaf.slot.parameter, True), leaf))
        return listened

    def _follow(
        self,
        result: Tensor,
        source: Heard,
        *,
        for_good: bool = False,
        axes: Axes | None = None,
    ) -> None:
        """Listen to what is called on `result`, too; for_good: beyond the next forward. axes: its, where known."""
        # bool: a mask that is counted
        if self.is_open and (result.is_floating_point() or result.dtype is torch.bool):
            result.__class__ = self._result
            result.heard = source  # type: ignore[attr-defined]
            result.axes = axes  # type: ignore[attr-defined]
            if not for_good:
                self._followed.append(weakref.ref(result))
