"""What `p.grad` is between backward and `zero_grad`: a tensor whose values lie in the buckets.

So that torch's own tools see gradients: `clip_grad_norm_`, `GradScaler`, torch's optimizers, `p.grad = None`. The
first that asks for values has all gradients summed and averaged over the replicas: collective, every rank asks alike.
Norms and changes by a number are computed on each rank's part; anything else fetches the whole gradient, which is
then what counts until the step.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from core.data_parallel.buffers.buffers import Buffer
from core.data_parallel.buffers.life import Phase
from core.data_parallel.buffers.units import Unit
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
ADDS = {aten.add_.Tensor, aten.add.Tensor}


_OURS = 2  # references to an object that one attribute holds: that, and the argument


class Sums(Protocol):
    """What a place asks of `GradientSums`."""

    phase: Phase
    wanted: Callable[[], None]

    def contribute(self, place: "ParameterSlot", gradient: Tensor) -> None:
        """Add to a gradient, inside of a backward."""
        ...


class ParameterSlot:
    """Where the gradients of one parameter go, and how many pairs are still to deliver to it in this step.

    delivered: something came since the last `zero_grad`. zeros: `zero_grad(set_to_none=False)` left it zeros, which
    is a gradient too. shown: `p.grad` has been set to what stands for it. whole: what somebody fetched of it.
    """

    def __init__(self, parameter: Parameter, name: str, buffer: Buffer, index: int) -> None:
        self.parameter, self.name, self.buffer, self.index = parameter, name, buffer, index
        self.delivered, self.zeros, self.pairs = False, False, 1
        self.round: Any = None  # stages 0, 1: the `Round` that counts it
        self.unit: Unit | None = None  # stage 3
        self.shown, self.step = False, 0
        self.whole: Tensor | None = None
        self.sums: Sums
        self.gradient = BucketGradient(self)

    @property
    def divided_now(self) -> bool:
        """Whether ranks hold a part of the gradient each."""
        return self.whole is None and self.buffer.stage >= 1 and self.buffer.ranks is not None

    def contribute(self, gradient: Tensor) -> None:
        self.sums.contribute(self, gradient)

    def summed(self) -> None:
        """Somebody asks for its values. Collective. Raises RuntimeError: they are not there yet, or not any more."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"the gradient of {self.name} was asked for inside of a backward, before the ranks have summed it; "
                "ask after backward (optimizer.register_step_pre_hook), or change it by parameter.register_hook"
            )
        if self.sums.phase is Phase.STEPPED:
            raise RuntimeError(
                f"the gradient of {self.name} was used up by the optimizer's step; read it between backward and step"
            )
        self.sums.wanted()

    def renew(self) -> None:
        """The next step's gradient: what somebody has kept of this one's is of no use any more."""
        self.step += 1
        if self.parameter.grad is self.gradient or sys.getrefcount(self.gradient) == _OURS:
            self.gradient.step = self.step
        else:
            self.gradient = BucketGradient(self)

    def part(self) -> Tensor:
        """The live elements that this rank updates; all of them, if somebody has fetched the whole."""
        return part_of(self) if self.whole is None else self.whole

    def fetched(self) -> Tensor:
        """The whole gradient, which counts from now on. All-gather."""
        if self.whole is None:
            self.whole = whole_of(self)
        return self.whole


class BucketGradient(Tensor):
    """`p.grad` of one parameter; see the module.

    Raises RuntimeError: its values asked for inside of a backward, or after the optimizer has used them up.
    """

    place: ParameterSlot
    step: int  # of which it is the gradient
    listener: Callable[[Any, Any], None] | None = None  # is told of functions by hand and their results (`by_hand`)

    def __new__(cls, place: ParameterSlot) -> "BucketGradient":
        """Of the parameter's shape and dtype, without memory."""
        like = place.parameter
        made = Tensor._make_wrapper_subclass(cls, tuple(like.shape), dtype=like.dtype, device=like.device)
        made.place, made.step = place, place.step
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def check_step(self) -> None:
        """Raises RuntimeError: its step is over, and the bucket holds another's gradient."""
        if self.step != self.place.step:
            raise RuntimeError(
                f"a gradient of {self.place.name} was kept past zero_grad(), which gives its memory to the next; "
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
        """The whole gradient's, which counts from now on."""
        self.check_step()
        self.place.summed()
        return self.place.fetched().numpy(*args, **kwargs)

    def __repr__(self) -> str:
        return f"BucketGradient({self.place.name}, {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ADDS and torch._C._current_graph_task_id() != -1 and type(args[0]) is cls:
            args[0].place.contribute(args[1])  # autograd accumulates
            return args[0] if func is aten.add_.Tensor else cls(args[0].place)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        mine = [leaf for leaf in leaves if type(leaf) is cls]
        for leaf in mine:
            leaf.check_step()
        if func is aten.detach.default:
            return cls(mine[0].place)
        mine[0].place.summed()
        if func in (aten._foreach_norm.Scalar, aten.linalg_vector_norm.default) and _over_all(func, args, kwargs):
            norms = _norms([leaf.place for leaf in mine], args[1] if len(args) > 1 else 2)
            return norms if func is aten._foreach_norm.Scalar else norms[0]
        if func in SCALES and isinstance(args[1], Tensor):
            _tell_of_stages(mine[0].place)
        local = (func in ELEMENTWISE and _numbers(leaves, cls)) or func is UNSCALE
        real = {id(leaf): leaf.place.part() if local else leaf.place.fetched() for leaf in mine}
        given = [real.get(id(leaf), leaf) for leaf in leaves]
        args_, kwargs_ = pytree.tree_unflatten(given, spec)
        out = func(*args_, **kwargs_)
        if func is UNSCALE:
            all_reduce(args_[1], mine[0].place.buffer.ps.world, "max")
        back = {id(real[id(leaf)]): leaf for leaf in mine}
        out = pytree.tree_map(lambda leaf: back.get(id(leaf), leaf), out)
        if mine[0].listener is not None:
            mine[0].listener(func, out)
        return out


def _tell_of_stages(place: ParameterSlot) -> None:
    """Warns, on a pipeline, where gradients are scaled by what `clip_grad_norm_` found."""
    if (stages := place.buffer.ps.size("pp")) > 1:
        warnings.warn(
            f"the gradients of 1 of {stages} pipeline ranks are scaled by a tensor: torch.nn.utils.clip_grad_norm_ "
            "takes the norm of this rank's stages, and every rank scales by its own; OptimizerConfig(clip_grad=...) "
            "clips by the norm of the model, and step() returns it",
            stacklevel=4,
        )


def _over_all(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a norm is one number per tensor, in its own dtype."""
    if func is aten._foreach_norm.Scalar:
        return not kwargs and all(type(one) is BucketGradient for one in args[0])
    return len(args) <= 2 and not any(value is not None for value in kwargs.values())


def _numbers(leaves: Sequence[Any], cls: type) -> bool:
    return all(type(leaf) is cls or not isinstance(leaf, Tensor) or not leaf.dim() for leaf in leaves)


def _norms(places: Sequence[ParameterSlot], order: float) -> list[Tensor]:
    """Of whole gradients, from each rank's part: over data ranks, then tensor ranks. One all-reduce per group."""
    parts = [place.part() for place in places]
    zero = torch.zeros((), dtype=torch.float64, device=parts[0].device)
    norms = [torch.linalg.vector_norm(part.double(), order) if part.numel() else zero for part in parts]
    ps = places[0].buffer.ps
    for over_tensor_ranks in (False, True):
        groups: dict[int, tuple[Group, list[int]]] = {}
        for number, place in enumerate(places):
            if over_tensor_ranks:
                group = ps.group("tp") if "tp" in layout_of(place.parameter).split else None
            else:
                group = place.buffer.ranks if place.divided_now else None
            if group is not None:
                groups.setdefault(id(group), (group, []))[1].append(number)
        for group, numbers in groups.values():
            for number, value in zip(numbers, _norm_over([norms[n] for n in numbers], order, group), strict=True):
                norms[number] = value
    return [norm.to(place.parameter.dtype) for norm, place in zip(norms, places, strict=True)]


def _norm_over(norms: Sequence[Tensor], order: float, group: Group) -> Tensor:
    """Norms of whole tensors from those of the ranks' parts: [n]."""
    whole = torch.stack(list(norms))
    if order == float("inf"):
        return all_reduce(whole, group, "max")
    total = all_reduce(whole**order, group)
    return total.sqrt() if order == 2 else total ** (1 / order)


def whole_of(place: ParameterSlot) -> Tensor:
    """The whole gradient, of the parameter's shape and dtype. All-gather of its bucket, where that is divided."""
    buffer, slot = place.buffer, place.buffer.bucket.slots[place.index]
    whole = all_gather(buffer.own_gradients, buffer.ranks) if place.divided_now else buffer.gradients
    shape = tuple(place.parameter.shape)
    return whole[slot.start : slot.stop].view(shape).to(place.parameter.dtype, copy=True)


def part_of(place: ParameterSlot) -> Tensor:
    """The live elements of the gradient that this rank updates: 1-D."""
    held, slot = place.buffer.held, place.buffer.bucket.slots[place.index]
    first, last = max(held[0], slot.start), min(held[1], slot.stop)
    return place.buffer.gradients[first - held[0] : max(first, last) - held[0]]


def put_back(place: ParameterSlot, whole: Tensor, factor: float) -> None:
    """This rank's part of a whole gradient, times `factor`, is what the step takes."""
    held, slot = place.buffer.held, place.buffer.bucket.slots[place.index]
    first, last = max(held[0], slot.start), min(held[1], slot.stop)
    if first < last:
        part = whole.detach().reshape(-1)[first - slot.start : last - slot.start].to(place.buffer.grad_dtype)
        part_of(place).copy_(part * factor)
