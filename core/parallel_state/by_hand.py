"""Detects arithmetic that a program does by hand with weights and gradients of which other ranks hold the rest.

`p.norm()`, `p @ p.T`, `torch.randn_like(p)`, `p[0]`, `p.shape` call nothing of ours, raise nothing and silently use
one rank's shard. So between a model's forwards parameters get a class that sees which functions are called on them.
While the model runs and while an optimizer steps they are plain ones: nothing is slower there.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from core.parallel_state.layout import layout_of

_REDUCTIONS = """
    norm _foreach_norm vector_norm matrix_norm cond sum mean prod var std var_mean std_mean max min amax amin aminmax
    argmax argmin median nanmedian quantile mode sort argsort topk kthvalue logsumexp softmax log_softmax normalize
    iter unbind nonzero mse_loss l1_loss smooth_l1_loss huber_loss kl_div cross_entropy histogram fft fft2
    rfft cumsum cumprod renorm count_nonzero unique histc svd svdvals qr eigh eigvals eigvalsh det slogdet inv pinv
    matrix_rank cosine_similarity dist cdist cov corrcoef nansum nanmean trace
"""
_PRODUCTS = "matmul mm bmm mv dot inner outer vdot linear einsum tensordot addmm baddbmm chain_matmul multi_dot kron"
# with one seed on all ranks every shard gets the same numbers
_DRAWS = """
    randn_like rand_like randint_like normal_ uniform_ bernoulli bernoulli_ dropout feature_dropout exponential_
    cauchy_ geometric_ log_normal_ random_ trunc_normal_ multinomial xavier_uniform_ xavier_normal_ kaiming_uniform_
    kaiming_normal_ orthogonal_ sparse_ eye_ dirac_
"""
# a width, a fan-in or a count is another on a shard; a buffer of that shape is right
_SHAPES = "shape size numel nelement len"
# row numbers of a shard are not row numbers of the full tensor
_INDICES = """
    getitem setitem select slice index_select index_fill_ index_copy_ index_add_ index_put_ index_fill index_copy
    index_add narrow embedding masked_fill masked_fill_ masked_select gather scatter scatter_ scatter_add_ numpy
    tolist
"""
_KIND_OF_FUNCTION = {
    **dict.fromkeys(_REDUCTIONS.split(), "reduction"),
    **dict.fromkeys(_PRODUCTS.split(), "product"),
    **dict.fromkeys(_DRAWS.split(), "draw"),
    **dict.fromkeys(_INDICES.split(), "index"),
    **dict.fromkeys(_SHAPES.split(), "shape"),
}
_NEW_BUFFERS = {"zeros_like", "ones_like", "full_like", "empty_like"}  # a momentum of one's own, say
WRONG_ON_SHARDS = {
    "reduction",
    "product",
    "draw",
    "index",
    "shape",
}  # their result on a shard is not the shard of the result
# torch's own frames between a program and `__torch_function__`
_TORCH_FRAMES = {"torch._tensor", "torch.overrides", "torch.functional", "torch.nn.functional", "torch.nn.utils"}
_TORCH_FRAMES |= {"torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch.nn.init"}
_TORCH_FRAMES |= {"torch.autograd"}


def _called_by_program(frame: Any) -> bool:
    """Whether a program called, not torch's or our own code; torch.nn.utils is a program's hand."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in _TORCH_FRAMES and not module.startswith("torch.nn.utils."):
            return not module.startswith(("torch.", "core.")) and module != "torch"
        frame = frame.f_back
    return False


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


def _function_name(func: Any) -> str:
    """vector_norm of `torch.linalg.vector_norm`, matmul of `@`, grad of `p.grad`."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return str(func.__self__.__name__)
    return name if name in _KIND_OF_FUNCTION else name.removeprefix("linalg_").removeprefix("__r").strip("_")


class ByHand:
    """Calls `report(Heard)` for the functions that a program calls on the parameters it was opened with.

    Elementwise functions, views and attributes are not reported. While an optimizer steps, parameters are plain.
    """

    def __init__(self, report: Callable[["Heard"], None], *, gradients: bool = False) -> None:
        self._report, self._gradients, self.is_open = report, gradients, False
        self._parameters: list[Parameter] = []
        self._followed: list[weakref.ref[Tensor]] = []  # results and gradients, to be given their own class back
        self._wrapped: list[tuple[dict, int, Callable]] = []  # a tensor's hooks, which one, what it was
        self._parameter, self._result = _classes(self)
        self._hooks = [
            weakref.finalize(self, register(_weak_hook(self, method)).remove)
            for register, method in (
                (register_optimizer_step_pre_hook, ByHand._plain),
                (register_optimizer_step_post_hook, ByHand._listening),
            )
        ]

    def open(self, parameters: Iterable[Parameter]) -> None:
        """Listen to these; those of another class (FSDP2's, freed ones) are left alone."""
        self._parameters, self.is_open = [], True
        for parameter in parameters:
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
        self._wrapped = []
        self._parameters, self.is_open = [], False

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
            if hasattr(tensor := reference(), "listener"):
                tensor.listener = None  # type: ignore[union-attr]
            elif type(tensor) is self._result:
                tensor.__class__ = Parameter if getattr(tensor, "_is_param", False) else Tensor
        self._followed = []

    def _listen_in_hooks(self, parameter: Parameter) -> None:
        """`register_hook` gives a program's function the gradient before it is `parameter.grad`."""

        def listened(hook: Callable, gradient: Tensor) -> Any:
            outer_followed, self._followed = self._followed, []
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
            if not self.is_open or not _called_by_program(caller):
                return result
            name = _function_name(func)
            kind = _KIND_OF_FUNCTION.get(name)  # None: elementwise, a view, a fact
            # vector_to_parameters cuts by sizes what parameters_to_vector joined: right
            if kind in ("shape", "index") and caller.f_globals.get("__name__", "").startswith("torch.nn.utils."):
                return result
            source, tensor = self._listened((*args, *kwargs.values()))
            if func is torch.autograd.grad:
                self._follow_gradients(result, args[1] if len(args) > 1 else kwargs["inputs"])
                return result
            if name == "grad":
                if self._gradients and type(result) is Tensor:
                    self._follow(result, Heard(source.parameter, True))
                elif self._gradients and hasattr(result, "listener"):  # what lies in buckets
                    result.listener = partial(self._called_inside, Heard(source.parameter, True))
                    self._followed.append(weakref.ref(result))
                return result
            if name == "all_reduce":
                self._report(replace(source, kind="sum", name=name, group=kwargs.get("group")))
            if kind is not None:
                on_list = name.startswith("foreach")
                self._report(replace(source, kind=kind, name=name, joined=source.joined or on_list))
            joins = name in ("cat", "stack", "hstack", "vstack", "concat")
            source = replace(source, joined=source.joined or joins)
            if kind is None and type(result) is Tensor and (joins or result.numel() == tensor.numel()):
                self._follow(result, source, for_good=name in _NEW_BUFFERS)
        return result

    def _follow_gradients(self, gradients: tuple[Tensor | None, ...], inputs: Any) -> None:
        """Results of `torch.autograd.grad`, in the order of its inputs."""
        inputs = [inputs] if isinstance(inputs, Tensor) else inputs
        for gradient, parameter in zip(gradients, inputs, strict=True):
            if self._gradients and type(gradient) is Tensor and isinstance(parameter, self._parameter):
                self._follow(gradient, Heard(parameter, True))

    def _called_inside(self, source: "Heard", func: Any, result: Any) -> None:
        """A gradient that lies in buckets was given to an operator of aten."""
        if not self.is_open or not _called_by_program(sys._getframe(2)):
            return
        name = func.overloadpacket.__name__.removeprefix("linalg_").strip("_")
        if name in _KIND_OF_FUNCTION:
            self._report(replace(source, kind=_KIND_OF_FUNCTION[name], name=name))
        elif type(result) is Tensor and result.shape == source.parameter.shape:
            self._follow(result, source)

    def _listened(self, values: Iterable[Any]) -> tuple["Heard", Tensor]:
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

    def _follow(self, result: Tensor, source: "Heard", *, for_good: bool = False) -> None:
        """Listen to what is called on `result`, too; for_good: beyond the next forward."""
        if result.is_floating_point() or result.dtype is torch.bool:  # a mask that is counted
            result.__class__, result.heard = self._result, source  # type: ignore[attr-defined]
            if not for_good:
                self._followed.append(weakref.ref(result))


_FULL_TENSOR_REMEDY = (
    "core.tensor_parallel.full_tensor(parameter) is the whole, with a gradient; or sum over "
    "parallel_state.get_tensor_model_parallel_group()"
)
_NORM_REMEDY = (
    "core.optimizer.get_grad_norm(parameters) is the whole model's norm, clip_grad_norm_ beside it clips by it"
)


@dataclass(frozen=True)
class Heard:
    """A function `name` of one of the kinds `WRONG_ON_SHARDS`, or "sum".

    Called on a parameter or its gradient, or on what elementwise functions made of either.
    """

    parameter: Parameter
    of_gradient: bool
    kind: str = ""
    name: str = ""
    joined: bool = False  # several of them, by cat, stack or a function of a list
    group: Any = None  # of an all_reduce by hand, kind "sum"; None is the world

    @property
    def sees_only_shard(self) -> bool:
        """Whether tensor ranks hold the rest of what was reduced, multiplied or drawn for."""
        layout = layout_of(self.parameter)
        tensor = "tp" in layout.split and tuple(self.parameter.shape) != layout.padded_shape()
        return tensor and self.kind in WRONG_ON_SHARDS

    def message(self, *modules: nn.Module) -> str:
        """What a user reads of a function of a part; the parameter is one of the modules'."""
        named = (pair for module in modules for pair in module.named_parameters())
        name = next((name for name, p in named if p is self.parameter), "a parameter")
        shape, full_shape = list(self.parameter.shape), list(layout_of(self.parameter).padded_shape())
        subject = "the gradient of " if self.of_gradient else ""
        if self.kind == "shape":
            remedy = (
                "buffers of that shape are right; widths, fan-ins, counts and draws of the whole want "
                "core.parallel_state.layout_of(parameter).shape"
            )
        elif self.kind == "index":
            remedy = "rows and columns by number are this rank's; core.tensor_parallel.full_tensor gives the whole"
        elif self.of_gradient:
            remedy = _NORM_REMEDY
        elif self.kind == "draw":
            remedy = "ranks that are seeded alike draw the same for their parts; give each a generator of its own"
        else:
            remedy = _FULL_TENSOR_REMEDY
        return (
            f"{self.name} by hand sees {shape} of {subject}{name}, this tensor rank's part of {full_shape}: {remedy}"
        )


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

    def called(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(("torch.optim.", "core.")):  # zero_grad, say: two per parameter, so no further calls
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        listener = reference()
        if func is Tensor.detach and caller == "torch.nn.parameter":
            parameter = _detached_for_a_parameter(args[0])
            if listener is not None:
                listener._followed.append(weakref.ref(parameter))  # closing makes it a plain one
            return parameter
        if listener is not None:
            return listener.called(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def copied(self: Tensor, memo: dict) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            plain: Tensor = self.detach().clone()
        memo[id(self)] = copy = Parameter(plain, self.requires_grad) if isinstance(self, Parameter) else plain
        return copy

    def reduced(self: Tensor, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.__reduce_ex__(self.as_subclass(Tensor), protocol)

    shared = {"__torch_function__": classmethod(called), "__deepcopy__": copied, "__module__": __name__}
    shared["reports_to"] = reference
    return type("Parameter", (Parameter,), shared), type("Tensor", (Tensor,), shared | {"__reduce_ex__": reduced})
