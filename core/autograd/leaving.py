"""Regions that tensors leave otherwise than as results: an auxiliary loss put on the module, what a hook collects.

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

from core.autograd.standin import LinearProxy

_USUAL = frozenset(nn.Module().__dict__)
_PLAIN = (*(type(None), bool, int, float, str), *(torch.dtype, torch.device, torch.Size, slice))


def is_plain(value: Any) -> bool:
    """Whether a tensor cannot hide in it."""
    return isinstance(value, _PLAIN)


def in_torch_func() -> bool:
    """Whether a transform of torch.func (vmap, grad) is around us."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


class Parts:
    """A module's parts as they are now, found in one walk; asked for at every call, so without a call for each.

    modules, parameters: each once. computed: (module, name, value) of weights that somebody computes outside, as old
    weight norms do. handed_out: hooks, a replaced forward or such a weight inside may know more than the results say.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.computed: list[tuple[nn.Module, str, Any]] = []
        self.handed_out = False
        parameters: dict[Any, None] = {}
        seen: set[int] = set()
        todo = [module]
        while todo:
            m = todo.pop()
            if m is None or id(m) in seen:
                continue
            seen.add(id(m))
            self.modules.append(m)
            own = m.__dict__
            if isinstance(m, torch.jit.ScriptModule):  # keeps its parts elsewhere
                parameters.update(dict.fromkeys(m.parameters(recurse=False)))
                todo += m.children()
                continue
            if own["_parameters"]:
                parameters.update(dict.fromkeys(own["_parameters"].values()))
            for name in own.keys() - _USUAL:
                value = own[name]
                if isinstance(value, Tensor) and value.requires_grad:
                    self.computed.append((m, name, value))
            # its own hooks and forward are around the region, not in it
            if m is not module and (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or ("forward" in own and not isinstance(getattr(own["forward"], "__self__", None), LinearProxy))
            ):
                self.handed_out = True
            if own["_modules"]:
                todo += reversed(own["_modules"].values())
        parameters.pop(None, None)
        self.parameters: list[Tensor] = list(parameters)
        self.handed_out = self.handed_out or bool(self.computed)


class Watch(TorchDispatchMode):
    """Remembers, weakly, every tensor that is made, whether ranks computed together, and nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Tensor]] = []
        self._collective = self.nested = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._collective = self._collective or "c10d" in func.namespace
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        self.nested = self.nested or any(t.is_nested for t in made)
        self._made += map(weakref.ref, made)
        return out

    def found(self, results: Any) -> bool:
        """Whether somebody holds a tensor with a gradient that is no result.

        Ranks that compute together must agree on it: there, what happens to be alive on one does not count.
        """
        results = pytree.tree_leaves(results)
        if not all(isinstance(t, Tensor) or is_plain(t) for t in results):
            return True
        if self._collective or not self._left(results):
            return False
        gc.collect()
        return self._left(results)

    def _left(self, results: list[Any]) -> bool:
        ids = {id(t) for t in results} | {id(t._base) for t in results if isinstance(t, Tensor) and t._is_view()}
        left = (t for t in (ref() for ref in self._made) if t is not None)
        return any(t.requires_grad and id(t) not in ids for t in left)


class _Again:
    """What torch's checkpoint enters around a second run; every backward of a retained graph has one."""

    def __init__(self, again: Callable[[], AbstractContextManager[Any]], tensors: Sequence[Tensor]) -> None:
        self._again, self._tensors = again, tensors
        self._versions = [t._version for t in tensors]

    @property
    def written(self) -> bool:
        """Whether somebody wrote into the tensors since."""
        return self._versions != [t._version for t in self._tensors]

    def __enter__(self) -> None:
        if self.written:
            raise RuntimeError("recompute: an input of a region was modified by an inplace operation; clone it first")
        self._entered = self._again()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


def call_with_graph(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    again: Callable[[], AbstractContextManager[Any]],
    tensors: Sequence[Tensor],
) -> Any:
    """`fn(*args, **kwargs)` with a graph that holds nothing; backward runs it once more, inside `again()`.

    Raises RuntimeError: it writes into one of its `tensors`, or others do so before backward.
    """
    second = _Again(again, tensors)
    made = checkpoint(
        partial(fn, **kwargs),
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), second),
        early_stop=False,  # as in the other kind of region: ranks must agree on the collectives inside
        determinism_check="none",  # it knows no nested tensors
    )
    if second.written:
        raise RuntimeError("recompute: the region writes into its input, so it cannot run again; clone it first")
    return made
