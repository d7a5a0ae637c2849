"""Activation checkpointing (arXiv 1604.06174): run a region again in backward instead of keeping its activations.

It runs again at most once per microbatch.

A region is one autograd Function whose inputs are its tensors and its parameters, so gradients,
`torch.autograd.grad`, post-accumulate hooks and DDP see an ordinary node. Where tensors leave it otherwise than as
results, which its first run shows, it is torch's checkpoint instead (core/autograd/recomputation/leaving.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from core.autograd.bag import StageContext
from core.autograd.graph import nodes_behind
from core.autograd.recomputation.leaving import (
    LeakWatch,
    RegionHistory,
    call_with_graph,
    in_torch_func,
    is_plain,
)
from core.autograd.recomputation.two_runs import Region, is_tensor, recomputed_region

# Functions and modules that `recompute` was called with -> what their first run showed.
_facts_of_callable: WeakKeyDictionary[Any, tuple] = WeakKeyDictionary()


def _unnamed_parameter(
    ends: Sequence[Tensor | GradientEdge], sources: Sequence[Tensor]
) -> Tensor | None:
    """A parameter that the region reads and nobody named: it would silently get no gradient."""
    named = {id(t) for t in sources}
    # behind a computed source its own graph continues
    ours = {t.grad_fn for t in sources}
    starts = [out.node if isinstance(out, GradientEdge) else out.grad_fn for out in ends]
    for node in nodes_behind(starts, ours.__contains__):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in named:
            return leaf
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
    def forward(ctx: Any, region: Region, *tensors: Tensor) -> Any:
        inputs = tensors[: region.count]
        # An output may be an input, a parameter or somebody's buffer: as an alias, those keep their own history.
        results = tuple(out.detach() for out in region.call_first(inputs))
        ctx.region = region
        ctx.parameters = tensors[region.count :]
        # an unused output gives no gradient, not zeros
        ctx.set_materialize_grads(False)
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
        region: Region = ctx.region
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
    region: Region,
    args: tuple,
    kwargs: dict,
    tensors: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> Any:
    """The region as torch's checkpoint; its first run is watched for leaked tensors. Not inside compiled code,
    which cannot trace this checkpoint."""
    history = region.history
    watch = None
    if history.leaks_tensors is None and not history.state.compiled:
        watch = LeakWatch()
    region.state_before = history.state.before()
    # regions inside are part of it
    token = recomputed_region.set(region)
    try:
        with watch or nullcontext(), region.notes.first_run():
            results = call_with_graph(region.fn, args, kwargs, region.as_first, tensors)
    finally:
        recomputed_region.reset(token)
    history.state.after(region.state_before)
    if watch is not None and watch.nested:
        raise _NestedError
    if history.leaks_tensors is None:
        ends = [t for t in pytree.tree_leaves(results) if is_tensor(t) and t.requires_grad]
        history.note_outputs(results, (*tensors, *parameters))
        unnamed = _unnamed_parameter(ends, (*tensors, *parameters))
        history.leaks_tensors = region.state_before.leaks_tensors or unnamed is not None
        # asked last: it may collect garbage
        if watch is not None and not history.leaks_tensors:
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
    region = Region(fn, args, kwargs, stage)
    region.remember(parameters)
    region.history = history
    region.notes.keeps_activations = history.keeps_activations
    tensors = region.tensors
    region.tensors = []
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
