"""Repeats what a program calls on a context rank's rows, on whole sequences: are both one program?

Tables know by name which functions meet rows. This knows none: what is called on rows is called once more on a copy
of them, and on the rows of all ranks. Where the program ends, at `backward` or where a hook returns, the two must
agree on this rank's rows: gradients but for a number of ranks, hidden states in each value.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.context_parallel.rows import lanes
from core.context_parallel.rows.judged import Leaf, are_gradients_alike
from core.context_parallel.rows.reads import READS, SUM_REMEDY
from core.context_parallel.rows.twins import (
    BATCH,
    EVALUATION,
    OF_HOOK,
    TRAINING,
    Twins,
    differ,
    has_twins,
    known_size,
    misfit_of,
)
from core.context_parallel.whole import gather_from_context_region
from core.parallel_state.by_hand.listened_tensor import unmark
from core.parallel_state.by_hand.split_names import kind_of
from core.parallel_state.by_hand.split_tensor import REPEATED, Call, Follower, SplitTensor
from core.parallel_state.context import ContextRows
from core.parallel_state.state import ParallelState

_P = ParamSpec("_P")
# elements of whole sequences, at most: a larger output is not repeated
_LARGEST = 2**26
# after which the same rows begin anew, without their gradients
_CUT_NAMES = "detach data clone to cpu cuda float double half bfloat16 contiguous"
_CUTS = frozenset(_CUT_NAMES.split())
_NO_LOSSES = ("norm", "vector_norm", "sum", "sqrt", "max", "min", "count_nonzero")
_FACTS = ("requires_grad", "retain_grad", "register_hook", "backward", "grad")
REMEDY = (
    "Make what meets other rows of whole sequences: gather_from_context_region(x, ps, dim) of core.context_parallel "
    "gathers them, ContextRows.of_state(ps).of(y, dim) cuts what is made of them; masks, weights and shifted labels "
    "before context_batch cuts the batch; counts are summed over parallel_state.get_context_parallel_group()"
)


def is_repeated(count: int) -> bool:
    """Whether a forward is one of those that are repeated: the 1st, 2nd, 4th, 8th ..."""
    return not count & (count - 1)


def _looks_on(method: Callable[_P, None]) -> Callable[_P, None]:
    """What it cannot do ends no right program; what it says may, where a program makes errors of warnings."""

    @wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Warning:
            raise
        except Exception:
            return

    return guarded


class _Teller(Protocol):
    def tell(self, what: str, remedy: str) -> None: ...

    def tell_of_log(self, name: str, remedy: str) -> None: ...


class Wholes(Follower):
    """Of one model."""

    def __init__(self, ps: ParallelState, owner: _Teller) -> None:
        super().__init__()
        self._ps = ps
        self._rows = ContextRows.of_state(ps)
        self._owner = owner
        self._leaves: list[Leaf] = []
        # functions that are not known to be by row, since the forward began
        self._names: list[str] = []
        # what is to be said of a hook, once others have said what they know
        self._of_hook = ""
        # of what a part of the model's is about to return to the program
        self._of_part: Twins | None = None
        # what `loss_fn` returned to an executor
        self.loss: Tensor | None = None
        self._kept: list[weakref.ref[Tensor]] = []

    @property
    def ranks(self) -> int:
        """Of which each has some rows."""
        return self._rows.size

    def begin(self) -> None:
        """A forward, or its batch, begins."""
        self._say_of_hook()
        self._leaves = [leaf for leaf in self._leaves if leaf.own() is not None]
        self._kept = [reference for reference in self._kept if reference() is not None]
        self._names = []
        self.forget_dead()

    def end(self) -> None:
        """Nobody looks at what was marked any more."""
        self.make_plain()
        self._leaves, self._kept = [], []

    def gathered(self, x: Tensor, dim: int) -> Tensor | None:
        """Whole sequences of rows [.., s/cp, ..]; None where they are too large. All-gather over cp."""
        if x.numel() * self._rows.size > _LARGEST:
            return None
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # a program may view it, as it does its rows
            whole = gather_from_context_region(x.detach().as_subclass(Tensor), self._ps, dim)
            return whole.contiguous()

    def add(self, x: Tensor, whole: Tensor, dim: int | None, source: int | None = None) -> None:
        """`x`, rows of `whole`, is about to be given to the program; dim: where its gradient is looked at."""
        if source is None:
            source = TRAINING if x.requires_grad else EVALUATION if dim is not None else BATCH
        with torch._C.DisableTorchFunctionSubclass():
            own = x.detach().as_subclass(Tensor).clone()
            whole = whole.detach().as_subclass(Tensor)
            self.keep(x, self._begun(own, whole, dim, source))

    def _begun(self, own: Tensor, whole: Tensor, dim: int | None, source: int) -> Twins:
        if dim is None:
            return Twins(own, whole, source=source)
        leaves = own.detach().requires_grad_(), whole.detach().requires_grad_()
        self._leaves.append(Leaf(weakref.ref(leaves[0]), weakref.ref(leaves[1]), dim))
        if not torch.is_grad_enabled():
            return Twins(*leaves, dim, source=source)
        # what is written into is no leaf
        return Twins(leaves[0] * 1, leaves[1] * 1, dim, source=source)

    def keep(self, x: Any, twins: Twins | str) -> None:
        """What is called on `x` is repeated on these; or the name of a function that could not be."""
        self.mark(x, None, REPEATED)
        if isinstance(x, SplitTensor):
            x.twins = twins  # type: ignore[attr-defined]
            self._kept.append(weakref.ref(x))

    def _forget(self, written: list) -> None:
        """Something was written there that could not be repeated: nothing is known of all that shares its memory."""
        followed = [x for x in written if isinstance(x, SplitTensor)]
        storages = {x.untyped_storage().data_ptr() for x in followed}
        for x in (reference() for reference in self._kept):
            if hasattr(x, "twins") and x.untyped_storage().data_ptr() in storages:  # type: ignore[union-attr]
                del x.twins  # type: ignore[union-attr]

    def heard(self, call: Call, follow: Callable[[Call], None]) -> None:
        """Let `follow` see the call as if nothing were repeated, and repeat it."""
        twins = [getattr(x, "twins", None) for x in call.inputs]
        for x in call.inputs:
            if x.partial == REPEATED:
                unmark(x)
        try:
            follow(replace(call, inputs=[x for x in call.inputs if isinstance(x, SplitTensor)]))
        finally:
            # the others may have given up some of them
            for x, known in zip(call.inputs, twins, strict=True):
                if known is not None and getattr(x, "twins", None) is not known:
                    self.keep(x, known)
        self.repeat(call)

    def hear(self, call: Call) -> None:
        # where others follow something of it, they are asked
        other = next((x.seen_by() for x in call.inputs if x.partial != REPEATED), None)
        if other is not None:
            other.hear(call)
        else:
            self.repeat(call)

    @_looks_on
    def repeat(self, call: Call) -> None:
        """After what the program called was called, and all others have seen it."""
        if call.name == "backward":
            named = {k: v for k, v in call.kwargs.items() if k in ("gradient", "grad_tensors")}
            self.judge(*call.args[:2], **named)
            return
        if call.name in _FACTS:
            return
        if call.name in (*READS, "bool") and not isinstance(call.result, Tensor):
            self._read(call.inputs[0])
            return
        written = pytree.tree_leaves(call.args[:1]) if call.writes else []
        if call.name == "all_reduce":
            self._reduced(call)
        elif not self._repeat(call, written):
            self._forget(written)

    @_looks_on
    def _read(self, x: Any) -> None:
        """A number of an evaluation, or a log of a hook's: told where it is not that of whole sequences."""
        if not has_twins(x) or x.twins.source not in (EVALUATION, OF_HOOK):
            return
        # a loss of a hook's is a rank's own, as that of the model is
        is_loss = x.requires_grad and x.twins.made_by not in _NO_LOSSES
        if x.twins.source == OF_HOOK and is_loss:
            return
        own, whole = x.twins.own.detach(), x.twins.whole.detach()
        if own.shape == whole.shape and differ(own, whole):
            self._owner.tell_of_log("a number over", SUM_REMEDY)

    def read(self, name: str, tensor: SplitTensor) -> None:
        self._read(tensor)

    def _reduced(self, call: Call) -> None:
        """It is of all ranks now: the same beside rows and beside whole sequences."""
        for x in call.inputs:
            if call.result is None:
                with torch._C.DisableTorchFunctionSubclass():
                    value = x.detach().as_subclass(Tensor).clone()
                self.keep(x, Twins(value, value.clone()))
            else:  # not yet
                self._forget([x])

    def _repeat(self, call: Call, written: list) -> bool:
        """Whether it could be; written: what the call has written into."""
        results = [x for x in pytree.tree_leaves(call.result) if isinstance(x, Tensor)]
        if not results and not written:
            return True
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        misfit: str | None = next(filter(None, map(misfit_of, tensors)), "")
        if not misfit:
            followed = [x for x in tensors if isinstance(x, SplitTensor)]
            if not all(map(has_twins, followed)) or not lanes.is_repeatable(call):
                return False
        # of a tensor of the program's own a second write would be seen
        if not all(hasattr(x, "twins") for x in written if isinstance(x, Tensor)):
            return False
        if sum(x.numel() for x in results) * self._rows.size > _LARGEST:
            return False
        if not misfit:
            misfit = self._run_both(call, all(map(has_twins, tensors)))
        if misfit:
            for x in (*results, *written):
                self.keep(x, misfit)
        return misfit is not None

    def _run_both(self, call: Call, is_of_rows: bool) -> str | None:
        """None: it could not be; the name, where nothing but rows is in it. is_of_rows: all its tensors are such."""
        known = [x.twins for x in pytree.tree_leaves((call.args, call.kwargs)) if has_twins(x)]
        is_scaled = lanes.is_scaled(call, self._rows.size)
        is_unlike = is_scaled or any(x.unscaled is not x.whole for x in known)
        if is_unlike and call.writes and not _part_unscaled(call.args[0]):
            return None
        try:
            own = lanes.run_in("own", call, self._rows.size)
            # before the whole is written into
            unscaled = lanes.run_in("unscaled", call, self._rows.size) if is_unlike else None
        except Exception:
            # who looks on must not end a right program
            return None
        try:
            whole = lanes.run_in("whole", call, self._rows.size)
        except Exception:
            # of what has other sizes
            return call.name if is_of_rows or lanes.fills_a_mask(call) else None
        if kind_of(call.name) not in ("element", "fact", "view") and call.name not in self._names:
            self._names.append(call.name)
        found = map(pytree.tree_leaves, (call.result, own, whole, unscaled if is_unlike else whole))
        for x, *made in zip(*found, strict=False):
            if isinstance(x, Tensor) and all(isinstance(one, Tensor) for one in made):
                self.keep(x, self._made(call, known, *made))
        return ""

    def _made(
        self, call: Call, known: list[Twins], own: Tensor, whole: Tensor, unscaled: Tensor
    ) -> Twins:
        source = max(x.source for x in known)
        first: Any = call.args[0] if call.args else None
        dim = first.twins.dim if has_twins(first) and call.name in _CUTS else None
        if dim is not None and own.is_floating_point() and not own.requires_grad:
            return self._begun(own, whole, dim, source)
        return Twins(own, whole, dim, unscaled, source, call.name)

    @_looks_on
    def called(self, part: nn.Module, args: tuple, output: Any) -> None:
        """A program has called a norm or a linear of the model's, which works by row, on rows."""
        x: Any = args[0] if args else None
        results = [y for y in pytree.tree_leaves(output) if isinstance(y, Tensor)]
        if not has_twins(x) or not results or hasattr(results[0], "twins"):
            return
        weights = dict(part._parameters)
        try:
            # whose gradients are none of this
            part._parameters.update({n: _kept(p) for n, p in weights.items() if p is not None})  # type: ignore[misc]
            made = [part.forward(getattr(x.twins, lane), *args[1:]) for lane in ("own", "whole")]
        finally:
            part._parameters.update(weights)
        own, whole = (pytree.tree_leaves(y)[0] for y in made)
        self._of_part = Twins(own, whole, source=x.twins.source)

    @_looks_on
    def returned_by(self, part: nn.Module, args: tuple, output: Any) -> None:
        """What the program gets of that call, which other hooks may have wrapped."""
        twins, self._of_part = self._of_part, None
        if twins is not None:
            self.keep(next(y for y in pytree.tree_leaves(output) if isinstance(y, Tensor)), twins)

    @_looks_on
    @torch.no_grad()
    def check_returned(self, x: Any, name: str, *, is_training: bool) -> None:
        """A hook of the program's has returned `x`, [s/cp, b, h], which goes on in the model."""
        if misfit := misfit_of(x):
            self._tell_of_misfit(misfit)
        if not has_twins(x) or x.twins.own.shape != x.shape:
            return
        with torch._C.DisableTorchFunctionSubclass():
            own, whole = x.twins.own, x.twins.whole
            if whole.dim() != own.dim() or len(whole) != len(own) * self._rows.size:
                return
            if not torch.equal(own, x) and not torch.allclose(own, x):
                return
            rows = self._rows.cut(whole, 0)
            if differ(own, rows):
                self._of_hook = f"what a hook on {name} makes of hidden states"
        if not is_training:
            self._say_of_hook()

    def _say_of_hook(self) -> None:
        what, self._of_hook = self._of_hook, ""
        if what:
            self._say(what)

    def sizes(self, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """`x.shape`, `x.size(dim)`, `x.numel()`: numbers that know what they are of whole sequences."""
        x = args[0]
        if not has_twins(x):
            return result
        whole = x.twins.whole
        if not isinstance(result, int):
            known = map(known_size, result, whole.shape)
            return torch.Size(list(known)) if len(result) == whole.dim() else result
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return known_size(result, whole.numel() if dim is None else whole.shape[dim])

    def returned(self, loss: SplitTensor, count: Any) -> None:
        self.loss = loss

    @_looks_on
    def judge_returned(self) -> None:
        """The backward of an executor has come to an output."""
        loss, self.loss = self.loss, None
        if loss is not None:
            self.judge(loss)

    def judge(self, losses: Any, gradient: Any = None, **rest: Any) -> None:
        """A backward from these has ended."""
        self._say_of_hook()
        gradient = next(iter(rest.values()), gradient)
        found = [x for x in pytree.tree_leaves(losses) if isinstance(x, Tensor)]
        given = [x for x in pytree.tree_leaves(gradient) if isinstance(x, Tensor)]
        if misfit := next(filter(None, map(misfit_of, found)), ""):
            self._tell_of_misfit(misfit)
        if not found or not all(map(has_twins, found)) or len(given) not in (0, len(found)):
            return
        if not are_gradients_alike(found, given, self._leaves, self._rows):
            self._say("the gradient that a loss gives rows")

    def _tell_of_misfit(self, name: str) -> None:
        self._owner.tell(
            f"{name} is given rows in a number that only this context rank has: the same functions cannot be called "
            "on whole sequences",
            REMEDY,
        )

    def _say(self, what: str) -> None:
        calls = f" It calls {', '.join(self._names[:8])}." if self._names else ""
        self._owner.tell(
            f"{what} which are this context rank's is not what the same functions make of whole sequences.{calls} "
            "Some of them meets other rows, their places or their number",
            REMEDY,
        )


def _part_unscaled(x: Any) -> bool:
    """Before it is written into: give `x` an unscaled twin of its own; False where others share its memory."""
    if not has_twins(x) or x.twins.whole._base is not None:
        return False
    if x.twins.unscaled is x.twins.whole:
        x.twins.unscaled = x.twins.whole.clone()
    return True


def _kept(weight: nn.Parameter) -> Tensor:
    """Its values, also once ZeRO stage 3 has freed them."""
    return weight.detach() if type(weight) is nn.Parameter else weight.detach().clone()
