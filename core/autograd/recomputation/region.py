"""Activation checkpointing (arXiv 1604.06174): run a region again in backward instead of keeping its activations.

It runs again at most once per microbatch.

A region is one autograd Function whose inputs are its tensors and its parameters, so gradients,
`torch.autograd.grad`, post-accumulate hooks and DDP see an ordinary node. Where tensors leave it otherwise than as
results, which its first run shows, it is torch's checkpoint instead (core/autograd/recomputation/leaving.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from core.autograd.bag import StageContext
from core.autograd.recomputation.lazy_product import LazyProduct, RegionLinears, linears_of_region
from core.autograd.recomputation.leaving import (
    LeakWatch,
    RegionHistory,
    call_with_graph,
    in_torch_func,
    is_plain,
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
recomputed_region: ContextVar["_Region | None"] = ContextVar("running_again", default=None)


# Functions and modules that `recompute` was called with -> what their first run showed.
_facts_of_callable: WeakKeyDictionary[Any, tuple] = WeakKeyDictionary()


def _is_tensor(value: Any) -> bool:
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


class _Region:
    """Everything that a second run must find as the first did, but for its tensors: autograd saves those."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict, stage: StageContext | None) -> None:
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.fn, self.stage, self.notes = fn, stage, Notes()
        # a tensor passed twice stays one tensor in the second run (attention asks `query is key`)
        index_of: dict[int, int] = {}
        self.tensor_indices: list[int | None] = []  # of each leaf; None of a constant
        self.constants: list[Any] = []
        self.tensors: list[Tensor] = []
        for leaf in leaves:
            if not _is_tensor(leaf):
                self.tensor_indices.append(None)
                self.constants.append(leaf)
                continue
            if id(leaf) not in index_of:
                index_of[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
            self.tensor_indices.append(index_of[id(leaf)])
            self.constants.append(None)
        self.count = len(self.tensors)
        self.history, self.linears = RegionHistory(), RegionLinears()
        self.in_backward = False  # its own; one inside `fn` is another
        self.wants_no_gradient: list[bool] = []  # of each result, whether it wants no gradient
        self.out_spec: Any = None
        self.output_is_tensor: list[bool] = []
        self.out_constants: list = []

    def remember(self, parameters: Sequence[Tensor]) -> None:
        """Note device, stage, random numbers and autocast before the first run."""
        tensors = (*self.tensors, *parameters)
        cpu = torch.device("cpu")
        self.device = next((t.device for t in tensors if t.device.type != "cpu"), cpu)
        # bag, seed, step and microbatch: dropout draws the same mask in the second run
        self.snapshot = self.stage.snapshot() if self.stage is not None else None
        self.random, self.draws = random_state(self.device), True
        # what our dropout reads, which draws nothing
        self.seed = torch.default_generator.initial_seed()
        self.autocast = Autocast(self.device)

    def call(self, tensors: Sequence[Tensor]) -> list:
        """Run on these tensors; returns the flat outputs."""
        pairs = zip(self.tensor_indices, self.constants, strict=True)
        leaves = [constant if index is None else tensors[index] for index, constant in pairs]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        outputs, self.out_spec = pytree.tree_flatten(self.fn(*args, **kwargs))
        return outputs

    def call_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first run, without grad mode; returns the tensors among the outputs and remembers the others."""
        versions = [t._version for t in tensors]
        self.state_before = self.history.state.before()
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
        self.output_is_tensor = [_is_tensor(out) for out in outputs]
        self.out_constants = [None if _is_tensor(out) else out for out in outputs]
        return [out for out in outputs if _is_tensor(out)]

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
        except Exception:  # perhaps code that bypasses torch's dispatch found no value
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
                out for out in self.autocast.rerun(lambda: self.call(tensors)) if _is_tensor(out)
            ]
        _check_constant(outputs, self.wants_no_gradient)
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
        present_stage = self.stage.snapshot() if self.stage is not None else None
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
        leaves = [next(remaining) if is_tensor else constant for is_tensor, constant in pairs]
        return pytree.tree_unflatten(leaves, self.out_spec)


def _unnamed_parameter(
    ends: Sequence[Tensor | GradientEdge], sources: Sequence[Tensor]
) -> Tensor | None:
    """A parameter that the region reads and nobody named: it would silently get no gradient."""
    named = {id(t) for t in sources}
    seen = {t.grad_fn for t in sources}  # behind a computed source its own graph continues
    to_visit = [out.node if isinstance(out, GradientEdge) else out.grad_fn for out in ends]
    while to_visit:
        node = to_visit.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in named:
            return leaf
        to_visit.extend(next_node for next_node, _ in node.next_functions)
    return None


def _check_all_named(ends: Sequence[Tensor | GradientEdge], sources: Sequence[Tensor]) -> None:
    if (leaf := _unnamed_parameter(ends, sources)) is not None:
        raise RuntimeError(
            f"recompute: the region uses a parameter of shape {list(leaf.shape)} that is neither an argument nor in "
            "`parameters`, and did not the first time, so it would get no gradient; name it there"
        )


@contextmanager
def _without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Take hooks off parameters: they run once, outside, when autograd has the region's full gradient.

    A placeholder stays, because operations ask whether a parameter has hooks.
    """
    hooks: list[dict] = [p._backward_hooks for p in parameters if p._backward_hooks]
    saved_hooks = [dict(hooks_of_parameter) for hooks_of_parameter in hooks]
    for hooks_of_parameter in hooks:
        hooks_of_parameter.clear()
        hooks_of_parameter[-1] = lambda gradient: None
    try:
        yield
    finally:
        for hooks_of_parameter, original in zip(hooks, saved_hooks, strict=True):
            hooks_of_parameter.clear()
            hooks_of_parameter.update(original)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: _Region, *tensors: Tensor) -> Any:
        inputs = tensors[: region.count]
        # An output may be an input, a parameter or somebody's buffer: as an alias, those keep their own history.
        results = tuple(out.detach() for out in region.call_first(inputs))
        ctx.region, ctx.parameters = region, tensors[region.count :]
        ctx.set_materialize_grads(False)  # an unused output gives no gradient, not zeros
        ctx.save_for_backward(*inputs)
        region.wants_no_gradient = region.history.constants(results, tensors)
        without_gradient = []
        for result, wants_none in zip(results, region.wants_no_gradient, strict=True):
            if wants_none or not (result.is_floating_point() or result.is_complex()):
                without_gradient.append(result)
        ctx.mark_non_differentiable(*without_gradient)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "recompute: no second derivatives through a region (create_graph=True)"
            )
        region: _Region = ctx.region
        needs = ctx.needs_input_grad[1:]
        if all(gradient is None for gradient in gradients):
            return None, *(None for _ in needs)
        # a pack hook (offloading, an outer checkpoint) may have saved a copy without requires_grad
        saved = zip(ctx.saved_tensors, needs, strict=False)
        inputs = [t.detach().requires_grad_(need) for t, need in saved]
        ends, output_gradients = region.call_second(inputs, gradients)
        sources = (*inputs, *ctx.parameters)
        is_requested = [need and t.requires_grad for t, need in zip(sources, needs, strict=True)]
        gradients_found: list = [None] * sum(is_requested)
        if ends and gradients_found:
            starts = [t for t, requested in zip(sources, is_requested, strict=True) if requested]
            if not region.history.all_parameters_named:
                _check_all_named(ends, sources)
                region.history.all_parameters_named = True
            # from here operations may put weight gradients past autograd: this backward passes everything on
            region.in_backward = True
            with _without_hooks(ctx.parameters):
                gradients_found = list(
                    torch.autograd.grad(ends, starts, output_gradients, allow_unused=True)
                )
        remaining = iter(gradients_found)
        return None, *(next(remaining) if requested else None for requested in is_requested)


class _NestedError(RuntimeError):
    """A run made nested tensors, whose sizes differ in every run."""


@torch.compiler.disable
def _run_with_graph(
    region: _Region,
    args: tuple,
    kwargs: dict,
    tensors: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> Any:
    """The region as torch's checkpoint; its first run is watched for leaked tensors. Not inside compiled code,
    which cannot trace this checkpoint."""
    history = region.history
    watch = LeakWatch() if history.leaks_tensors is None and not history.state.compiled else None
    region.state_before = history.state.before()
    token = recomputed_region.set(region)  # regions inside are part of it
    try:
        with watch or nullcontext(), region.notes.first_run():
            results = call_with_graph(region.fn, args, kwargs, region.as_first, tensors)
    finally:
        recomputed_region.reset(token)
    history.state.after(region.state_before)
    if watch is not None and watch.nested:
        raise _NestedError
    if history.leaks_tensors is None:
        ends = [t for t in pytree.tree_leaves(results) if _is_tensor(t) and t.requires_grad]
        history.note_outputs(results, (*tensors, *parameters))
        unnamed = _unnamed_parameter(ends, (*tensors, *parameters))
        history.leaks_tensors = region.state_before.leaks_tensors or unnamed is not None
        if watch is not None and not history.leaks_tensors:  # asked last: it may collect garbage
            history.leaks_tensors = watch.leaked(results)
    region.state_before.attributes += history.computed
    return results


def run_region(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    stage: StageContext | None,
    parameters: Sequence[Tensor],
    history: RegionHistory,
) -> Any:
    """`recompute` with the arguments as a tuple and a dict, so that no keyword of `fn` is taken for one of ours."""
    if not torch.is_grad_enabled() or recomputed_region.get() is not None or in_torch_func():
        return fn(*args, **kwargs)
    region = _Region(fn, args, kwargs, stage)
    region.remember(parameters)
    region.history = history
    region.notes.keeps_activations = history.keeps_activations
    tensors, region.tensors = region.tensors, []
    if history.leaks_tensors is None and history.state.scripted:
        history.leaks_tensors = False
    if (
        history.leaks_tensors is not False
        or history.may_leak
        or not all(map(is_plain, region.constants))
    ):
        try:
            return _run_with_graph(region, args, kwargs, tensors, parameters)
        except RuntimeError as error:
            if not isinstance(error, _NestedError) and "saved tensor hooks" not in str(error):
                raise
        # torch.func or nested tensors inside: torch's checkpoint knows neither
        history.leaks_tensors = False
        region.restore()
    results = _Recompute.apply(region, *tensors, *parameters)
    if not region.state_before.leaks_tensors:
        return region.results(results)
    del results  # tensors leaked, and did not the first time
    history.leaks_tensors = True
    region.restore()
    return _run_with_graph(region, args, kwargs, tensors, parameters)


def recompute(
    fn: Callable,
    *args: Any,
    stage: StageContext | None = None,
    parameters: Iterable[Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """`fn(*args, **kwargs)` that keeps only its inputs and runs again, once, inside backward.

    Arguments and results are any nesting of tensors and constants. `parameters` names every tensor that `fn`
    reads from elsewhere and that needs a gradient; by default those of the module that `fn` is or belongs to.
    No input needs to require a gradient. Random numbers, the stage's microbatch and bag, and autocast are as
    in the first run. A region called inside another one is part of it: nothing runs a third time.

    Its first run is watched: if it keeps tensors otherwise than as results, or reads parameters that nobody named,
    it runs as torch's checkpoint ever after.
    Raises RuntimeError: the region writes into its input; in backward, it used a Parameter that nobody named, and
    did not the first time, or create_graph=True.
    """
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    owner = owner if isinstance(owner, nn.Module) else None
    if parameters is None:
        parameters = owner.parameters() if owner is not None else ()
    key = owner if owner is not None else getattr(fn, "__code__", None)
    history = RegionHistory(owner)
    if key in _facts_of_callable:
        history.first_run_facts = _facts_of_callable[key]
    results = run_region(fn, args, kwargs, stage, list(parameters), history)
    if key is not None and history.leaks_tensors is not None:
        _facts_of_callable[key] = history.first_run_facts
    return results
