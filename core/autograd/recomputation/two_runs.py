"""What a region's second run, inside backward, must find as its first run did."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from core.autograd.bag import StageContext
from core.autograd.recomputation.first_outputs import magnitudes
from core.autograd.recomputation.lazy_product import LazyProduct, RegionLinears, linears_of_region
from core.autograd.recomputation.leaving import (
    RegionHistory,
)
from core.autograd.recomputation.module_state import (
    Autocast,
    random_state,
    same_random_state,
    set_random_state,
)
from core.autograd.recomputation.notes import Notes

# Set while a region runs again, and read only inside that run, in the same thread: a region inside a region
# then keeps its activations, else it would run a third time.
recomputed_region: ContextVar["Region | None"] = ContextVar("running_again", default=None)


def is_tensor(value: Any) -> bool:
    """Whether a leaf of arguments or results is a tensor; others are constants."""
    return isinstance(value, Tensor)


def _backward_ends(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list, list[Tensor]]:
    """Where backward starts, and with which gradients; of an output without a value its gradient edge."""
    with_gradient = [
        (o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad
    ]
    ends = [
        get_gradient_edge(output) if isinstance(output, LazyProduct) else output
        for output, _ in with_gradient
    ]
    return ends, [gradient for _, gradient in with_gradient]


def _check_constant(outputs: Sequence[Tensor], wants_no_gradient: Sequence[bool]) -> None:
    if any(c and o.requires_grad for c, o in zip(wants_no_gradient, outputs, strict=True)):
        raise RuntimeError(
            "recompute: a result of the region wants a gradient now, and wanted none the first time with the same "
            "parameters trained; let it depend on them always or never"
        )


class Region:
    """One call of a region: all that its second run must find as the first did.

    But for its tensors: autograd saves those.
    """

    def __init__(self, fn: Callable, args: tuple, kwargs: dict, stage: StageContext | None) -> None:
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.fn = fn
        self.stage = stage
        self.notes = Notes()
        # a tensor passed twice stays one tensor in the second run (attention asks `query is key`)
        index_of: dict[int, int] = {}
        # of each leaf; None of a constant
        self.tensor_indices: list[int | None] = []
        self.constants: list[Any] = []
        self.tensors: list[Tensor] = []
        for leaf in leaves:
            if not is_tensor(leaf):
                self.tensor_indices.append(None)
                self.constants.append(leaf)
                continue
            if id(leaf) not in index_of:
                index_of[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
            self.tensor_indices.append(index_of[id(leaf)])
            self.constants.append(None)
        self.count = len(self.tensors)
        self.history = RegionHistory()
        self.linears = RegionLinears()
        # its own; one inside `fn` is another
        self.in_backward = False
        # of each result, whether it wants no gradient
        self.wants_no_gradient: list[bool] = []
        self.out_spec: Any = None
        self.output_is_tensor: list[bool] = []
        # of the first few calls, their magnitudes
        self.first_outputs: list[Tensor | None] = []
        self.out_constants: list = []

    def remember(self, parameters: Sequence[Tensor]) -> None:
        """Note device, stage, random numbers and autocast before the first run."""
        tensors = (*self.tensors, *parameters)
        cpu = torch.device("cpu")
        self.device = next((t.device for t in tensors if t.device.type != "cpu"), cpu)
        # bag, seed, step and microbatch: dropout draws the same mask in the second run
        self.snapshot = self.stage.snapshot() if self.stage is not None else None
        self.random = random_state(self.device)
        self.draws = True
        # what our dropout reads, which draws nothing
        self.seed = torch.default_generator.initial_seed()
        self.autocast = Autocast(self.device)

    def call(self, tensors: Sequence[Tensor]) -> list:
        """Run on these tensors; returns the flat outputs."""
        pairs = zip(self.tensor_indices, self.constants, strict=True)
        leaves = []
        for index, constant in pairs:
            if index is None:
                leaves.append(constant)
            else:
                leaves.append(tensors[index])
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        outputs, self.out_spec = pytree.tree_flatten(self.fn(*args, **kwargs))
        return outputs

    def call_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first run, without grad mode; returns the tensors among the outputs and remembers the others."""
        versions = [t._version for t in tensors]
        self.state_before = self.history.state.before()
        self.linears.is_compared = self.history.same_outputs.is_turn()
        token = linears_of_region.set(self.linears)
        try:
            with self.notes.first_run():
                outputs = self.call(tensors)
        finally:
            linears_of_region.reset(token)
        self.draws = not same_random_state(self.random, random_state(self.device))
        self.history.state.after(self.state_before)
        if versions != [t._version for t in tensors]:
            raise RuntimeError(
                "recompute: the region writes into its input, and did not the first time; clone it first"
            )
        self.output_is_tensor = [is_tensor(out) for out in outputs]
        self.out_constants = [None if is_tensor(out) else out for out in outputs]
        tensors = [out for out in outputs if is_tensor(out)]
        if self.linears.is_compared:
            self.first_outputs = magnitudes(tensors) + self.linears.operands
        return tensors

    def call_second(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[list, list[Tensor]]:
        """The second run, which stops early where it may. Returns where backward starts, and with which gradients."""
        if not self.history.early_stop_tries:
            return _backward_ends(self._rerun_as_first(tensors, None), gradients)
        self.linears.begin_second_run()
        try:
            ends = _backward_ends(self._rerun_as_first(tensors, self.linears), gradients)
            self.linears.end()
        except Exception:
            # perhaps code that bypasses torch's dispatch found no value
            if not self.linears.has_postponed:
                raise
            self.history.early_stop_tries = 0
            return _backward_ends(self._rerun_as_first(tensors, None), gradients)
        self.history.early_stop_tries -= self.linears.was_computed
        return ends

    def _rerun_as_first(
        self, tensors: Sequence[Tensor], count: RegionLinears | None
    ) -> list[Tensor]:
        with self.as_first(count):
            outputs = [
                out for out in self.autocast.rerun(lambda: self.call(tensors)) if is_tensor(out)
            ]
        _check_constant(outputs, self.wants_no_gradient)
        if self.linears.is_compared:
            owner = getattr(self.fn, "__self__", self.fn)
            name = getattr(owner, "__name__", type(owner).__name__)
            second = magnitudes(outputs) + self.linears.operands
            self.history.same_outputs.compare(self.first_outputs, second, name)
        return outputs

    @contextmanager
    def as_first(self, count: RegionLinears | None = None) -> Iterator[None]:
        """Around a second run: the first run's bag, random numbers and module state; the present ones are restored.

        The bag is closed meanwhile, as it was in the first run.
        """
        present_random = None
        # what drew nothing from torch's generators then draws nothing now; it may have read their seed
        if self.draws or self.seed != torch.default_generator.initial_seed():
            present_random = random_state(self.device)
            set_random_state(self.device, self.random)
        present_stage = None
        if self.stage is not None:
            present_stage = self.stage.snapshot()
        if self.stage is not None:
            self.stage.restore(self.snapshot)  # type: ignore[arg-type]
        bag = self.stage.bag if self.stage is not None else None
        was_open = bag is not None and bag.open
        if bag is not None:
            bag.open = False
        token = recomputed_region.set(self)
        outer_linears = linears_of_region.set(count)
        try:
            with (
                torch.enable_grad(),
                self.history.state.with_state(self.state_before),
                self.notes.second_run(),
            ):
                yield
        finally:
            recomputed_region.reset(token)
            linears_of_region.reset(outer_linears)
            if bag is not None:
                bag.open = was_open
            if present_random is not None:
                set_random_state(self.device, present_random)
            if self.stage is not None:
                self.stage.restore(present_stage)  # type: ignore[arg-type]

    def restore(self) -> None:
        """Undo a first run that is tried again."""
        self.history.state.restore(self.state_before)
        set_random_state(self.device, self.random)

    def results(self, results: Sequence[Tensor]) -> Any:
        """The outputs in the form in which `fn` returned them."""
        remaining = iter(results)
        pairs = zip(self.output_is_tensor, self.out_constants, strict=True)
        leaves = []
        for has_value, constant in pairs:
            if has_value:
                leaves.append(next(remaining))
            else:
                leaves.append(constant)
        return pytree.tree_unflatten(leaves, self.out_spec)
