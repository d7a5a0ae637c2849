"""What `p.grad` is between backward and `zero_grad`: a tensor whose values lie in the buckets.

Torch's own tools see gradients through it: `clip_grad_norm_`, `GradScaler`, torch's optimizers, `p.grad = None`. The
first that asks for values has all gradients summed and averaged over the replicas: collective, so every rank must ask
alike. Norms and changes by a number are computed on each rank's elements; anything else gathers the full gradient,
which is then what counts until the step.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from core.data_parallel.buffers.buffers import Buffer
from core.data_parallel.buffers.changes import ChangesByHand
from core.data_parallel.buffers.life import Phase
from core.data_parallel.buffers.units import StageUnits, Unit
from core.parallel_state.collectives import Group, all_gather, all_reduce
from core.parallel_state.layout import layout_of

aten = torch.ops.aten
# in place, the same for every element
ELEMENTWISE = {
    aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.clamp_.default,
    aten.clamp_max_.default, aten.clamp_min_.default, aten.neg_.default, aten.nan_to_num_.default,
    aten.zero_.default, aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar, aten._foreach_div_.Scalar,
    aten._foreach_div_.Tensor, aten._foreach_clamp_max_.Scalar, aten._foreach_clamp_min_.Scalar,
    aten._foreach_zero_.default, aten._foreach_neg_.default,
}  # fmt: skip
SCALES = {aten.mul_.Tensor, aten._foreach_mul_.Tensor}
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
NORMS = {aten._foreach_norm.Scalar, aten.linalg_vector_norm.default}
ADDS = {aten.add_.Tensor, aten.add.Tensor}
_OWN_REFERENCES = 2  # references to an object that one attribute holds: the attribute, and getrefcount's argument


class Sums(Protocol):
    """What a slot asks of `GradientSums`."""

    phase: Phase
    changes: ChangesByHand
    sum_and_average: Callable[[], None]

    def contribute(self, slot: "ParameterSlot", gradient: Tensor) -> None:
        """Add to a gradient, inside of a backward."""
        ...

    def begin_addition(self, slot: "ParameterSlot") -> None:
        """An operation is about to add to a gradient itself."""
        ...


class ParameterSlot:
    """Where the gradients of one parameter go, and how many pairs are still to deliver to it in this step.

    delivered: a gradient came since the last `zero_grad`. zeroed: `zero_grad(set_to_none=False)` left it zeros, which
    is a gradient too. shown: `p.grad` has been set to the `BucketGradient` that stands for it. fetched: the full
    gradient, where somebody asked for more than norms and scaling.
    """

    def __init__(self, parameter: Parameter, name: str, buffer: Buffer, index: int) -> None:
        self.parameter, self.name, self.buffer, self.index = parameter, name, buffer, index
        self.delivered, self.zeroed, self.pairs = False, False, 1
        self.round: Any = None  # stages 0, 1: the `Round` that counts it
        self.unit: Unit | None = None  # stage 3
        self.shown, self.step = False, 0
        self.fetched: Tensor | None = None
        self.sums: Sums
        self.gradient = BucketGradient(self)
        parameter.take_main_grad = self.take  # type: ignore[attr-defined]

    @property
    def divided_now(self) -> bool:
        """Whether each rank holds a shard of the gradient."""
        return self.fetched is None and self.buffer.stage >= 1 and self.buffer.ranks is not None

    def contribute(self, gradient: Tensor) -> None:
        self.sums.contribute(self, gradient)

    def take(self) -> Tensor:
        """The full gradient, to be added to: `take_main_grad` of the parameter."""
        self.sums.begin_addition(self)
        return self.buffer.take(self.index)

    def request_values(self) -> None:
        """A program asks for values: all gradients are summed and averaged first. Collective.

        Raises RuntimeError: they are not there yet, or not any more.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"the gradient of {self.name} was asked for inside of a backward, before the ranks have summed it; "
                "ask after backward (optimizer.register_step_pre_hook), or change it by parameter.register_hook"
            )
        if self.sums.phase is Phase.STEPPED:
            raise RuntimeError(
                f"the gradient of {self.name} was used up by the optimizer's step; read it between backward and step"
            )
        self.sums.sum_and_average()

    def renew(self) -> None:
        """Begin the next step's gradient: what a program has kept of this one's is of no use any more.

        Nobody has kept it if only this slot refers to it; then the object is used again.
        """
        self.step += 1
        if self.parameter.grad is self.gradient or sys.getrefcount(self.gradient) == _OWN_REFERENCES:
            self.gradient.step = self.step
        else:
            self.gradient = BucketGradient(self)

    def local_gradient(self) -> Tensor:
        """The live elements that this rank updates; all of them, if the full gradient was fetched."""
        return local_gradient_of(self) if self.fetched is None else self.fetched

    def full_gradient(self) -> Tensor:
        """The full gradient, which counts from now on. All-gather."""
        if self.fetched is None:
            self.fetched = gather_gradient(self)
        return self.fetched


class BucketGradient(Tensor):
    """`p.grad` of one parameter; see the module.

    Raises RuntimeError: its values asked for inside of a backward, or after the optimizer has used them up.
    """

    slot: ParameterSlot
    step: int  # the number of the step whose gradient it is
    listener: Callable[[Any, Any], None] | None = None  # hears of functions by hand and their results (`by_hand`)

    def __new__(cls, slot: ParameterSlot) -> "BucketGradient":
        """Of the parameter's shape and dtype, without memory."""
        parameter = slot.parameter
        gradient = Tensor._make_wrapper_subclass(
            cls, tuple(parameter.shape), dtype=parameter.dtype, device=parameter.device
        )
        gradient.slot, gradient.step = slot, slot.step
        return gradient

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def check_step(self) -> None:
        """Raises RuntimeError: its step is over, and the bucket holds another's gradient."""
        if self.step != self.slot.step:
            raise RuntimeError(
                f"a gradient of {self.slot.name} was kept past zero_grad(), which gives its memory to the next; "
                "keep p.grad.clone()"
            )

    @property
    def data(self) -> Tensor:
        """Itself; what is assigned to it is copied."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.copy_(value)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """The full gradient's, which counts from now on."""
        self.check_step()
        self.slot.request_values()
        return self.slot.full_gradient().numpy(*args, **kwargs)

    def __repr__(self) -> str:
        return f"BucketGradient({self.slot.name}, {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ADDS and torch._C._current_graph_task_id() != -1 and type(args[0]) is cls:
            args[0].slot.contribute(args[1])  # autograd accumulates
            return args[0] if func is aten.add_.Tensor else cls(args[0].slot)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        ours = [leaf for leaf in leaves if type(leaf) is cls]
        for leaf in ours:
            leaf.check_step()
        if func is aten.detach.default:
            return cls(ours[0].slot)
        ours[0].slot.request_values()

        # Norms, as clip_grad_norm_ asks for them: each rank's elements, then one all-reduce per group.
        if func in NORMS and _one_norm_per_tensor(func, args, kwargs):
            norms = _global_norms([leaf.slot for leaf in ours], args[1] if len(args) > 1 else 2)
            return norms if func is aten._foreach_norm.Scalar else norms[0]
        if func in SCALES and isinstance(args[1], Tensor):
            _warn_of_pipeline_stages(ours[0].slot)

        # Elementwise changes by numbers run on each rank's elements; anything else gets full gradients.
        local = (func in ELEMENTWISE and _only_scalars_beside(leaves, cls)) or func is UNSCALE
        if local:
            for leaf in leaves:
                if type(leaf) is not cls and isinstance(leaf, (Tensor, int, float)):
                    ours[0].slot.sums.changes.add(leaf)
        plain_of: dict[int, Tensor] = {}
        for leaf in ours:
            plain_of[id(leaf)] = leaf.slot.local_gradient() if local else leaf.slot.full_gradient()
        plain_leaves = [plain_of.get(id(leaf), leaf) for leaf in leaves]
        plain_args, plain_kwargs = pytree.tree_unflatten(plain_leaves, spec)
        result = func(*plain_args, **plain_kwargs)
        if func is UNSCALE:
            all_reduce(plain_args[1], ours[0].slot.buffer.ps.world, "max")  # found_inf: one rank's skips all steps
        # a function in place returns its argument: ours again, not the plain tensor
        original_of = {id(plain_of[id(leaf)]): leaf for leaf in ours}
        result = pytree.tree_map(lambda leaf: original_of.get(id(leaf), leaf), result)
        if ours[0].listener is not None:
            ours[0].listener(func, result)
        return result


def _warn_of_pipeline_stages(slot: ParameterSlot) -> None:
    """Warns, on a pipeline, where gradients are scaled by what `clip_grad_norm_` found."""
    if (stages := slot.buffer.ps.size("pp")) > 1:
        warnings.warn(
            f"the gradients of 1 of {stages} pipeline ranks are scaled by a tensor: torch.nn.utils.clip_grad_norm_ "
            "takes the norm of this rank's stages, and every rank scales by its own; OptimizerConfig(clip_grad=...) "
            "clips by the norm of the model, and step() returns it",
            stacklevel=4,
        )


def _one_norm_per_tensor(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a norm is one number per tensor, in the tensor's own dtype."""
    if func is aten._foreach_norm.Scalar:
        return not kwargs and all(type(tensor) is BucketGradient for tensor in args[0])
    return len(args) <= 2 and not any(value is not None for value in kwargs.values())


def _only_scalars_beside(leaves: Sequence[Any], cls: type) -> bool:
    return all(type(leaf) is cls or not isinstance(leaf, Tensor) or not leaf.dim() for leaf in leaves)


def _global_norms(slots: Sequence[ParameterSlot], order: float) -> list[Tensor]:
    """Norms of full gradients, from each rank's elements. One all-reduce per group."""
    ps = slots[0].buffer.ps
    norms = []
    for slot in slots:
        elements = slot.local_gradient()
        if elements.numel():
            norms.append(torch.linalg.vector_norm(elements.double(), order))
        else:
            norms.append(torch.zeros((), dtype=torch.float64, device=elements.device))
    # First over the data ranks that share a bucket, then over the ranks that share a matrix, or its experts.
    for axis in ("", "tp", "ep"):
        members: dict[int, tuple[Group, list[int]]] = {}
        for number, slot in enumerate(slots):
            if axis:
                group = ps.group(axis) if axis in layout_of(slot.parameter).split else None
            else:
                group = slot.buffer.ranks if slot.divided_now else None
            if group is not None:
                members.setdefault(id(group), (group, []))[1].append(number)
        for group, numbers in members.values():
            combined = _combine_norms([norms[number] for number in numbers], order, group)
            for number, norm in zip(numbers, combined, strict=True):
                norms[number] = norm
    return [norm.to(slot.parameter.dtype) for norm, slot in zip(norms, slots, strict=True)]


def _combine_norms(norms: Sequence[Tensor], order: float, group: Group) -> Tensor:
    """Norms of full tensors from the norms of each rank's elements: [n]."""
    stacked = torch.stack(list(norms))
    if order == float("inf"):
        return all_reduce(stacked, group, "max")
    total = all_reduce(stacked**order, group)
    return total.sqrt() if order == 2 else total ** (1 / order)


def gather_gradient(slot: ParameterSlot) -> Tensor:
    """The full gradient, of the parameter's shape and dtype. All-gather of its bucket, where that is divided."""
    buffer, parameter = slot.buffer, slot.parameter
    lies_at = buffer.bucket.slots[slot.index]
    flat = all_gather(buffer.own_gradients, buffer.ranks) if slot.divided_now else buffer.gradients
    full = flat[lies_at.start : lies_at.stop].view(tuple(parameter.shape))
    return full.to(parameter.dtype, copy=True)


def local_gradient_of(slot: ParameterSlot) -> Tensor:
    """The live elements of the gradient that this rank updates: 1-D, none if they lie with other ranks."""
    lies_at = slot.buffer.bucket.slots[slot.index]
    begin, end = slot.buffer.updated_interval
    first, last = max(begin, lies_at.start), min(end, lies_at.stop)
    return slot.buffer.gradients[first - begin : max(first, last) - begin]


def store_gradient(slot: ParameterSlot, full: Tensor, factor: float) -> None:
    """Write this rank's elements of a full gradient, times `factor`, where the step takes them."""
    lies_at = slot.buffer.bucket.slots[slot.index]
    begin, end = slot.buffer.updated_interval
    first, last = max(begin, lies_at.start), min(end, lies_at.stop)
    if first < last:
        elements = full.detach().reshape(-1)[first - lies_at.start : last - lies_at.start]
        local_gradient_of(slot).copy_(elements.to(slot.buffer.grad_dtype) * factor)


def make_slots(buffers: Iterable[Buffer], names: Mapping[Parameter, str]) -> list[ParameterSlot]:
    """One per parameter, in the order of the buckets."""
    slots = []
    for buffer in buffers:
        for index, parameter in enumerate(buffer.parameters):
            slots.append(ParameterSlot(parameter, names[parameter], buffer, index))
    return slots


def set_units(slots: Iterable[ParameterSlot], stage_units: Iterable[StageUnits]) -> None:
    """Tell each slot which layer is gathered and freed with its parameter."""
    unit_of: dict[Parameter, Unit] = {}
    for units in stage_units:
        for unit in units.layers:
            unit_of.update(dict.fromkeys(unit.parameters, unit))
    for slot in slots:
        slot.unit = unit_of.get(slot.parameter)
