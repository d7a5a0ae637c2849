"""Recomputed regions that leak tensors other than results: an auxiliary loss put on the module, what hooks collect.

Such a tensor needs a graph of its own. So a region that has some runs as torch's checkpoint without reentry: its
first run has a graph, whose saved tensors are dropped and made again in backward.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from core.autograd.proxy import LinearProxy
from core.autograd.recomputation.first_outputs import SameOutputs
from core.autograd.recomputation.module_state import ModuleState

_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
_PLAIN_TYPES = (
    *(type(None), bool, int, float, str),
    *(torch.dtype, torch.device, torch.Size, slice),
)


def is_plain(value: Any) -> bool:
    """Whether a tensor cannot hide in it."""
    return isinstance(value, _PLAIN_TYPES)


def in_torch_func() -> bool:
    """Whether a transform of torch.func (vmap, grad) is around us."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


class Submodules:
    """A module's submodules and parameters as they are now, found in one walk without a function call for each.

    modules, parameters: each once. computed: (module, name, value) of weights that are computed outside, as old
    weight norms do. may_leak: hooks, a replaced forward or such a weight inside may keep tensors that are no results.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.computed: list[tuple[nn.Module, str, Any]] = []
        self.may_leak = False
        parameters: dict[Any, None] = {}
        seen: set[int] = set()
        to_visit = [module]
        while to_visit:
            submodule = to_visit.pop()
            if submodule is None or id(submodule) in seen:
                continue
            seen.add(id(submodule))
            self.modules.append(submodule)
            attributes = submodule.__dict__
            # a ScriptModule keeps its parts elsewhere
            if isinstance(submodule, torch.jit.ScriptModule):
                parameters.update(dict.fromkeys(submodule.parameters(recurse=False)))
                to_visit += submodule.children()
                continue
            if attributes["_parameters"]:
                parameters.update(dict.fromkeys(attributes["_parameters"].values()))
            for name in attributes.keys() - _MODULE_ATTRIBUTES:
                value = attributes[name]
                if isinstance(value, Tensor) and value.requires_grad:
                    self.computed.append((submodule, name, value))
            # its own hooks and forward are around the region, not in it
            if submodule is not module:
                replaced = "forward" in attributes
                is_proxy = replaced and isinstance(
                    getattr(attributes["forward"], "__self__", None), LinearProxy
                )
                if (
                    attributes["_forward_hooks"]
                    or attributes["_forward_pre_hooks"]
                    or (replaced and not is_proxy)
                ):
                    self.may_leak = True
            if attributes["_modules"]:
                # taken from the end, so the order is that of `modules()`
                to_visit += reversed(attributes["_modules"].values())
        parameters.pop(None, None)
        self.parameters: list[Tensor] = list(parameters)
        self.may_leak = self.may_leak or bool(self.computed)


class LeakWatch(TorchDispatchMode):
    """Remembers, weakly, every tensor that is made, whether ranks computed together, and nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._tensor_refs: list[weakref.ref[Tensor]] = []
        self._collective = self.nested = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._collective = self._collective or "c10d" in func.namespace
        tensors = [tensor for tensor in pytree.tree_leaves(out) if isinstance(tensor, Tensor)]
        self.nested = self.nested or any(tensor.is_nested for tensor in tensors)
        self._tensor_refs += map(weakref.ref, tensors)
        return out

    def leaked(self, results: Any) -> bool:
        """Whether a tensor with a gradient lives on that is no result.

        Ranks that compute together must agree on it: there, what happens to be alive on one does not count.
        """
        results = pytree.tree_leaves(results)
        if not all(isinstance(tensor, Tensor) or is_plain(tensor) for tensor in results):
            return True
        if self._collective or not self._unreturned_alive(results):
            return False
        # what only a cycle of references keeps alive has not leaked; collecting is slow, so only in doubt
        gc.collect()
        return self._unreturned_alive(results)

    def _unreturned_alive(self, results: list[Any]) -> bool:
        # results may live on: the caller has them
        ids = {id(tensor) for tensor in results}
        # a result that is a view keeps its base alive
        ids |= {
            id(tensor._base)
            for tensor in results
            if isinstance(tensor, Tensor) and tensor._is_view()
        }
        for ref in self._tensor_refs:
            tensor = ref()
            # one without elements has no gradient to lose; torch's checkpoint keeps such a one until torch 2.11
            if (
                tensor is not None
                and tensor.requires_grad
                and id(tensor) not in ids
                and tensor.numel()
            ):
                return True
        return False


class RegionHistory:
    """What earlier runs of a region have shown.

    all_parameters_named: the graph was walked once, and every parameter in it was named.
    state: of the modules inside, which the second run finds as the first did.
    leaks_tensors: whether tensors live on that are no results; None until the first run. may_leak, computed: see
    `Submodules`.
    early_stop_tries: how often its second run may still skip the last product (lazy_product.py) in
    vain. Two, because a first run may be kept alive by chance: an error caught in some import keeps its frames.
    keeps_activations: whether activations that operations note are kept for the second run (notes.py).
    """

    all_parameters_named = False
    early_stop_tries = 2
    keeps_activations = False

    def __init__(self, module: nn.Module | None = None) -> None:
        self.state = ModuleState(None)
        self.leaks_tensors: bool | None = None
        self.may_leak = False
        self.same_outputs = SameOutputs()
        self.computed: list[tuple[nn.Module, str, Any]] = []
        self._source_trained: list[bool] = []
        self._output_wants_grad: list[bool] = []
        if module is not None:
            self.update(Submodules(module))

    @property
    def first_run_facts(self) -> tuple:
        """What the first run showed."""
        return (
            self.leaks_tensors,
            self._source_trained,
            self._output_wants_grad,
            self.same_outputs,
        )

    @first_run_facts.setter
    def first_run_facts(self, facts: tuple) -> None:
        (
            self.leaks_tensors,
            self._source_trained,
            self._output_wants_grad,
            self.same_outputs,
        ) = facts

    def note_outputs(self, results: Any, sources: Sequence[Tensor]) -> None:
        """After the first run: which of its results want a gradient, where these sources are trained."""
        self._source_trained = [t.requires_grad for t in sources]
        self._output_wants_grad = [
            t.requires_grad for t in pytree.tree_leaves(results) if isinstance(t, Tensor)
        ]

    def constants(self, results: Sequence[Tensor], sources: Sequence[Tensor]) -> list[bool]:
        """For each result: whether no gradient can flow from it, as far as the first run showed."""
        trained = [source.requires_grad for source in sources]
        if len(results) != len(self._output_wants_grad) or trained != self._source_trained:
            return [False] * len(results)
        return [not wants for wants in self._output_wants_grad]

    def update(self, submodules: Submodules) -> None:
        """Before a run: hooks, computed weights and submodules come and go."""
        self.state.refresh(submodules.modules)
        self.may_leak = submodules.may_leak
        self.computed = submodules.computed


class _SecondRun:
    """What torch's checkpoint enters around a second run; every backward of a retained graph has one."""

    def __init__(
        self, enter_second_run: Callable[[], AbstractContextManager[Any]], tensors: Sequence[Tensor]
    ) -> None:
        self._enter_second_run = enter_second_run
        self._tensors = tensors
        self._versions = [tensor._version for tensor in tensors]

    @property
    def was_written(self) -> bool:
        """Whether somebody wrote into the tensors since."""
        return self._versions != [tensor._version for tensor in self._tensors]

    def __enter__(self) -> None:
        if self.was_written:
            raise RuntimeError(
                "recompute: an input of a region was modified by an inplace operation; clone it first"
            )
        self._entered = self._enter_second_run()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


def call_with_graph(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    enter_second_run: Callable[[], AbstractContextManager[Any]],
    tensors: Sequence[Tensor],
) -> Any:
    """`fn(*args, **kwargs)` with a graph that holds nothing; backward runs it once more, inside `enter_second_run()`.

    Raises RuntimeError: it writes into one of its `tensors`, or others do so before backward.
    """
    second_run = _SecondRun(enter_second_run, tensors)
    tensors = checkpoint(
        partial(fn, **kwargs),
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), second_run),
        early_stop=False,  # as in the other kind of region: ranks must agree on the collectives inside
        determinism_check="none",  # it knows no nested tensors
    )
    if second_run.was_written:
        raise RuntimeError(
            "recompute: the region writes into its input, so it cannot run again; clone it first"
        )
    return tensors
