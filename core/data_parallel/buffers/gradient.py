"""What `p.grad` is between backward and `zero_grad`: a tensor whose values lie in the buckets.

Torch's own tools see gradients through it: `clip_grad_norm_`, `GradScaler`, torch's optimizers, `p.grad = None`. The
first that asks for values has all gradients summed and averaged over the replicas: collective, so every rank must ask
alike. Norms and changes by a number are computed on each rank's elements; anything else gathers the full gradient,
which is then what counts until the step.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from core.data_parallel.buffers.buffers import Buffer
from core.data_parallel.buffers.changes import ChangesByHand
from core.data_parallel.buffers.life import Phase
from core.data_parallel.buffers.norms import Scalings, global_norms, warn_of_whole_norm
from core.data_parallel.buffers.operations import (
    ADDS,
    ELEMENTWISE,
    NORMS,
    SCALES,
    UNSCALE,
    ZEROES,
    aten,
    one_norm_per_tensor,
    only_scalars_beside,
)
from core.data_parallel.buffers.told_sizes import ToldSizes
from core.data_parallel.buffers.units import Unit
from core.parallel_state.collectives import all_gather, all_reduce
from core.parallel_state.environment import reading_waits
from core.parallel_state.layout import layout_of

# references to an object that one attribute holds: the attribute, and getrefcount's argument
_OWN_REFERENCES = 2


class Sums(Protocol):
    """What a slot asks of `GradientSums`."""

    phase: Phase
    changes: ChangesByHand
    scalings: Scalings
    sum_and_average: Callable[[], None]
    meet: Callable[[str, Any], None]
    zeroed_by_hand: "set[ParameterSlot]"

    @property
    def has_executor(self) -> bool:
        """Whether an executor drives this step."""

    def contribute(self, slot: "ParameterSlot", gradient: Tensor) -> None:
        """Add to a gradient, inside of a backward."""
        ...

    def begin_addition(self, slot: "ParameterSlot") -> None:
        """An operation is about to add to a gradient itself."""
        ...

    def gradient_hooked(self, slot: "ParameterSlot", parameter: Tensor) -> None:
        """Autograd has put a gradient into `parameter.grad`, or an operation has added it."""
        ...


class ParameterSlot:
    """Where the gradients of one parameter go, and how many pairs are still to deliver to it in this step.

    delivered: a gradient came since the last `zero_grad`. zeroed: `zero_grad(set_to_none=False)` left it zeros, which
    is a gradient too. shown: `p.grad` has been set to the `BucketGradient` that stands for it. fetched: the full
    gradient, where somebody asked for more than norms and scaling.
    """

    def __init__(self, parameter: Parameter, name: str, buffer: Buffer, index: int) -> None:
        self.parameter = parameter
        self.name = name
        self.buffer = buffer
        self.index = index
        self.num_slots = 1  # of the DataParallel
        self.delivered = False
        self.zeroed = False
        self.pairs = 1
        # stages 0, 1: the `Round` that counts it
        self.round: Any = None
        self.unit: Unit | None = None  # stage 3
        self.shown = False
        self.step = 0
        self.fetched: Tensor | None = None
        # hears of operators by hand on the gradient, and their results (`by_hand`)
        self.listener: Callable[..., None] | None = None
        self.sums: Sums
        self.gradient = BucketGradient(self)
        parameter.take_main_grad = self.take  # type: ignore[attr-defined]

    @property
    def place(self) -> tuple[int, int]:
        """Which gradient it is: number of the bucket, number in it; the same on all ranks of a data group."""
        return self.buffer.number, self.index

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
                "ask after backward (optimizer.register_step_pre_hook), or change it by parameter.register_hook. "
                "torch's DistributedDataParallel around a model of a DataParallel asks so, too: use one of the two"
            )
        if self.sums.phase is Phase.STEPPED:
            raise RuntimeError(
                f"the gradient of {self.name} was used up by the optimizer's step; read it between backward and "
                "step, and call zero_grad() before a backward that counts"
            )
        self.sums.sum_and_average()

    def zero(self) -> bool:
        """`p.grad.zero_()`: whether that is done. Not of a summed gradient, which is changed as by any number.

        What has come in this step is forgotten on this rank, and every rank is to do so. Of gradients that are summed
        it is `zero_grad(set_to_none=False)` of one parameter: a backward begins anew when all are zeros, or None.
        """
        if torch._C._current_graph_task_id() != -1:
            return False
        # zeroing a summed gradient may also be the first half of a change
        if self.sums.phase is not Phase.OPEN:
            self.sums.zeroed_by_hand.add(self)
            return self.sums.phase is Phase.STEPPED
        self.sums.changes.add_call("zero_", [self.place])
        self.buffer.wait_sum()
        self.buffer.forget(self.index)
        return True

    def renew(self) -> None:
        """Begin the next step's gradient: what a program has kept of this one's is of no use any more.

        Nobody has kept it if only this slot refers to it; then the object is used again.
        """
        self.step += 1
        if (
            self.parameter.grad is self.gradient
            or sys.getrefcount(self.gradient) == _OWN_REFERENCES
        ):
            self.gradient.step = self.step
        else:
            self.gradient = BucketGradient(self)

    def local_gradient(self) -> Tensor:
        """The live elements that this rank updates; all of them, if the full gradient was fetched."""
        if self.fetched is None:
            return local_gradient_of(self)
        return self.fetched

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradient by a number that is the same on all ranks: each rank's elements."""
        self.sums.changes.add(factor)
        self.local_gradient().mul_(factor.to(self.buffer.grad_dtype))

    def full_gradient(self) -> Tensor:
        """The full gradient, which counts from now on. All-gather."""
        fetch_all([self])
        assert self.fetched is not None
        return self.fetched


class BucketGradient(ToldSizes):
    """`p.grad` of one parameter; see the module.

    Raises RuntimeError: its values asked for inside of a backward, or after the optimizer has used them up.
    """

    # Python's collector sees no `p.grad`: strong, it would free no model
    _slot: weakref.ref[ParameterSlot]
    step: int  # the number of the step whose gradient it is

    def __new__(cls, slot: ParameterSlot) -> "BucketGradient":
        """Of the parameter's shape and dtype, without memory."""
        parameter = slot.parameter
        gradient = Tensor._make_wrapper_subclass(
            cls, tuple(parameter.shape), dtype=parameter.dtype, device=parameter.device
        )
        gradient._slot = weakref.ref(slot)
        gradient.step = slot.step
        return gradient

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def slot(self) -> ParameterSlot:
        """Whose values these are. Raises RuntimeError: the model is gone."""
        if (slot := self._slot()) is None:
            raise RuntimeError(
                "a gradient was kept longer than its model, whose buckets held its values; keep p.grad.clone()"
            )
        return slot

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
        return self._full("numpy").numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """The full gradient's numbers, gathered from the ranks that hold its parts."""
        return self._full("tolist").tolist()

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._full("__dlpack__").__dlpack__(*args, **kwargs)

    def _full(self, function: str) -> Tensor:
        self.check_step()
        self.slot.request_values()
        meet([self.slot], function)
        full = self.slot.full_gradient()
        self.hear(function, full)
        return full

    def hear(self, function: str, result: Any) -> None:
        slot = self._slot()
        if slot is not None and slot.listener is not None:
            slot.listener(getattr(Tensor, function), result)

    def __repr__(self) -> str:
        slot = self._slot()
        return f"BucketGradient({slot.name if slot else 'its model is gone'}, {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ADDS and torch._C._current_graph_task_id() != -1 and type(args[0]) is cls:
            # autograd accumulates
            args[0].slot.contribute(args[1])
            return args[0] if func is aten.add_.Tensor else cls(args[0].slot)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        ours = [leaf for leaf in leaves if type(leaf) is cls]
        for leaf in ours:
            leaf.check_step()
        if func is aten.detach.default:
            return cls(ours[0].slot)
        if func is aten.detach_.default:
            return args[0]
        if func in ZEROES and (listener := ours[0].slot.listener) is not None:
            listener(func, None, (args, kwargs))
        if func in ZEROES and all([leaf.slot.zero() for leaf in ours]):
            return None if func is aten._foreach_zero_.default else args[0]
        slots = [leaf.slot for leaf in ours]
        if func not in ZEROES and func not in NORMS:
            for slot in slots:
                slot.sums.zeroed_by_hand.discard(slot)
        request_all(slots)

        # Elementwise changes by numbers run on each rank's elements; anything else gets full gradients.
        local = (func in ELEMENTWISE and only_scalars_beside(leaves, cls)) or func is UNSCALE
        if not local or func is UNSCALE:
            meet(slots, str(func))
        if func in NORMS and one_norm_per_tensor(func, args, kwargs, cls):
            warn_of_whole_norm([slot.parameter for slot in slots])  # before ranks meet
            if slots[0].listener is not None:
                slots[0].listener(func, None, norm_of=len(ours))
            norms = global_norms(slots, args[1] if len(args) > 1 else 2)
            norms = [norm.to(leaf.dtype) for norm, leaf in zip(norms, ours, strict=True)]
            return norms if func is aten._foreach_norm.Scalar else norms[0]
        if func in SCALES and isinstance(args[1], Tensor):
            slots[0].sums.scalings.hear(slots[0].buffer.ps.size("pp"), args[1], len(slots))

        if local:
            for changes in dict.fromkeys(slot.sums.changes for slot in slots):
                changes.add_call(str(func), [slot.place for slot in slots])
                for leaf in leaves:
                    if type(leaf) is not cls and isinstance(leaf, (Tensor, int, float)):
                        changes.add(leaf)
        if not local:
            fetch_all(slots)
        plain_of = {id(leaf): leaf.slot.local_gradient() for leaf in ours}
        plain_leaves = [plain_of.get(id(leaf), leaf) for leaf in leaves]
        plain_args, plain_kwargs = pytree.tree_unflatten(plain_leaves, spec)
        result = func(*plain_args, **plain_kwargs)
        if func is UNSCALE:
            # found_inf: one rank's skips all steps
            all_reduce(plain_args[1], ours[0].slot.buffer.ps.world, "max")
        # a function in place returns its argument: ours again, not the plain tensor
        original_of = {id(plain_of[id(leaf)]): leaf for leaf in ours}
        result = pytree.tree_map(lambda leaf: original_of.get(id(leaf), leaf), result)
        if slots[0].listener is not None:
            slots[0].listener(func, result, (args, kwargs))
        return result


def slot_of(parameter: Tensor) -> ParameterSlot | None:
    """Where a `DataParallel` keeps the gradient of a parameter; None of one that it does not hold."""
    owner = getattr(getattr(parameter, "take_main_grad", None), "__self__", None)
    if isinstance(owner, ParameterSlot):
        return owner
    return None


def request_all(slots: Iterable[ParameterSlot]) -> None:
    """`request_values` of the model, or models (an actor and a critic), that these are of."""
    for slot in {id(slot.sums): slot for slot in slots}.values():
        slot.request_values()


def meet(slots: Sequence[ParameterSlot], function: str) -> None:
    """Before a function that asks other ranks for parts of gradients: all ranks must be about to call it.

    Raises ValueError, on every rank, where one does something else.
    """
    for slot in slots:
        if slot.divided_now or {"tp", "ep"} & layout_of(slot.parameter).split.keys():
            places = [slot.place for slot in slots]
            more = f" and {len(slots) - 1} more" if len(slots) > 1 else ""
            slot.sums.meet(
                f"{function.removeprefix('aten.')} of {slot.name}{more}", (function, places)
            )
            return


def fetch_all(slots: Iterable[ParameterSlot]) -> None:
    """Full gradients, of the parameters' shapes and dtypes. All-gather per bucket that is divided."""
    flat_of: dict[int, Tensor] = {}
    for slot in slots:
        if slot.fetched is None:
            buffer = slot.buffer
            parameter = slot.parameter
            if id(buffer) not in flat_of:
                divided = slot.divided_now
                if divided:
                    flat_of[id(buffer)] = all_gather(buffer.own_gradients, buffer.ranks)
                else:
                    flat_of[id(buffer)] = buffer.gradients
            lies_at = buffer.bucket.slots[slot.index]
            full = flat_of[id(buffer)][lies_at.start : lies_at.stop].view(tuple(parameter.shape))
            slot.fetched = full.to(parameter.dtype, copy=True)


def local_gradient_of(slot: ParameterSlot) -> Tensor:
    """The live elements of the gradient that this rank updates: 1-D, none if they lie with other ranks."""
    lies_at = slot.buffer.bucket.slots[slot.index]
    begin, end = slot.buffer.updated_interval
    first = max(begin, lies_at.start)
    last = min(end, lies_at.stop)
    return slot.buffer.gradients[first - begin : max(first, last) - begin]


def is_as_it_was(slot: ParameterSlot) -> bool:
    """Whether a fetched gradient was only read, where that is seen: stage 0, where one rank may read alone."""
    if slot.buffer.stage or slot.fetched is None or reading_waits(slot.fetched.device):
        return False
    return torch.equal(local_gradient_of(slot).to(slot.fetched.dtype), slot.fetched.reshape(-1))


def store_gradient(slot: ParameterSlot, full: Tensor, factor: float) -> None:
    """Write this rank's elements of a full gradient, times `factor`, where the step takes them."""
    lies_at = slot.buffer.bucket.slots[slot.index]
    begin, end = slot.buffer.updated_interval
    first = max(begin, lies_at.start)
    last = min(end, lies_at.stop)
    if first < last:
        elements = full.detach().reshape(-1)[first - lies_at.start : last - lies_at.start]
        local_gradient_of(slot).copy_(elements.to(slot.buffer.grad_dtype) * factor)
