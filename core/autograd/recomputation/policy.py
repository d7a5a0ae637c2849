"""Which submodules of a model are recomputed (activation checkpointing): a policy, applied in place, removable."""

from collections.abc import Sequence
from fnmatch import fnmatch
from inspect import getattr_static
from typing import Any

import torch
from torch import nn

from core.autograd.bag import StageContext
from core.autograd.proxy import LinearProxy, proxies_of
from core.autograd.recomputation.leaving import RegionHistory, Submodules
from core.autograd.recomputation.region import run_region
from core.autograd.recomputation.two_runs import recomputed_region

Selector = str | type[nn.Module]
Policy = str | Sequence[Selector]


class _RecomputedForward(LinearProxy):
    """Runs the module's forward as a region."""

    def __init__(
        self, module: nn.Module, stage: StageContext | None, *, keeps_activations: bool
    ) -> None:
        super().__init__(module)
        self.stage = stage
        self.history = RegionHistory()
        self.history.keeps_activations = keeps_activations

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward as a region."""
        # inside another region it runs as it is: twice in all, not three times
        if not torch.is_grad_enabled() or recomputed_region.get() is not None:
            return self.call_replaced(*args, **kwargs)
        # found anew at every call: parameters are unfrozen, replaced, sharded after the model is built
        submodules = Submodules(self.module)
        self.history.update(submodules)
        return run_region(
            self.call_replaced, args, kwargs, self.stage, submodules.parameters, self.history
        )


def is_region(module: nn.Module) -> bool:
    """Whether a policy recomputes this module as one region."""
    return any(isinstance(proxy, _RecomputedForward) for proxy in proxies_of(module))


def has_regions(module: nn.Module) -> bool:
    """Whether any part of `module` is recomputed by a policy; the whole must then not be run again as well."""
    return any(map(is_region, module.modules()))


class RecomputeHandle:
    """The regions of a module that a policy wrapped; `remove()` gives them their own forward back."""

    def __init__(self, names: list[str], forwards: list[_RecomputedForward]) -> None:
        self.names = names
        self._forwards = forwards

    def remove(self) -> None:
        """Undo: activations are kept again."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []


def _matches(name: str, module: nn.Module, parent: nn.Module | None, selector: Selector) -> bool:
    last_part = name.rpartition(".")[2]
    if isinstance(selector, type):
        return isinstance(module, selector)
    return selector in (name, last_part) or fnmatch(name, selector)


def _is_layer(name: str, module: nn.Module, parent: nn.Module | None, selector: Selector) -> bool:
    return isinstance(parent, (nn.ModuleList, nn.ModuleDict))


def _callable_submodules(module: nn.Module) -> dict[str, nn.Module]:
    """By name, outer before inner; without containers that have no forward (ModuleList)."""
    named = {}
    for name, child in module.named_modules():
        # static: a class's descriptor must not run only to be looked at
        has_forward = getattr_static(type(child), "forward") is not nn.Module.forward
        if name and (has_forward or "forward" in child.__dict__):
            named[name] = child
    return named


def outermost(module: nn.Module, policy: Policy) -> dict[str, nn.Module]:
    """name -> submodule for what a policy names, without those inside another; in the order of the modules.

    policy: "layer" (every element of a ModuleList or ModuleDict); or names (full, last part, or a pattern such as
    "*.mlp") and module classes. Raises ValueError: a name or class that matches nothing.
    """
    rule = _is_layer if policy == "layer" else _matches
    selectors: Sequence[Selector] = [policy] if isinstance(policy, str) else policy
    children = _callable_submodules(module)
    parents: dict[str, nn.Module] = {}
    for name, parent in module.named_modules():
        for child_name, _ in parent.named_children():
            parents[f"{name}.{child_name}" if name else child_name] = parent
    matching: list[set[str]] = []
    for selector in selectors:
        matched = {
            name
            for name, child in children.items()
            if rule(name, child, parents.get(name), selector)
        }
        matching.append(matched)
        if not matched:
            last_parts = ", ".join(sorted({name.rpartition(".")[2] for name in children}))
            raise ValueError(f"{selector!r} matches no module; names here: {last_parts}")
    names: list[str] = []
    for name in children:
        is_inside = any(name.startswith(f"{outer}.") for outer in names)
        if not is_inside and any(name in matched for matched in matching):
            names.append(name)
    return {name: children[name] for name in names}


KEEPS = ("attention", "nothing")


def check_keeps(keeps: str) -> None:
    """Raise ValueError unless `keeps` is known."""
    if keeps not in KEEPS:
        raise ValueError(
            f"recompute_keeps={keeps!r} is none of the {len(KEEPS)} known: {', '.join(KEEPS)}"
        )


def apply_recompute(
    module: nn.Module,
    policy: Policy,
    *,
    stage: StageContext | None = None,
    keeps: str = "attention",
) -> RecomputeHandle:
    """Recompute regions of any module, in place, parameter names unchanged.

    policy: "none"; "layer" (every element of a ModuleList or ModuleDict); "selective" (every
    `core_attention`); or names (full, last part, or a pattern such as "*.mlp") and module classes.
    keeps: "attention": the output of attention is kept, so that no attention kernel runs twice, for one activation
    [s, b, h/tp] per layer; "nothing": all runs twice. "selective" keeps nothing: it recomputes attention alone.
    A region inside a region is not wrapped again: everything runs at most twice.
    Raises ValueError: an unknown policy, a name or class that matches nothing, or a model with a policy already.
    """
    check_keeps(keeps)
    if policy == "none":
        return RecomputeHandle([], [])
    if isinstance(policy, str) and policy not in ("layer", "selective"):
        raise ValueError(
            f"recompute={policy!r}: known are 'none', 'selective', 'layer' and lists of module names"
        )
    if wrapped := [
        name for name, child in _callable_submodules(module).items() if is_region(child)
    ]:
        raise ValueError(
            f"{', '.join(wrapped)}: recomputed already; call remove() on that policy's handle first (where one "
            "module is in two stages: recompute='stage')"
        )
    try:
        chosen = outermost(module, ["core_attention"] if policy == "selective" else policy)
    except ValueError as error:
        raise ValueError(f"recompute: {error}") from None
    names = list(chosen)
    for name, child in chosen.items():
        if any(proxy.moves_saved for part in child.modules() for proxy in proxies_of(part)):
            raise ValueError(
                f"{name}: its activations are offloaded already, and a region around that would have none of them to "
                "offload; call offload_activations after the policy is applied (or the Pipeline made)"
            )
    keeps_activations = keeps == "attention" and policy != "selective"
    forwards = [
        _RecomputedForward(child, stage, keeps_activations=keeps_activations)
        for child in chosen.values()
    ]
    for forward in forwards:
        forward.install()
    return RecomputeHandle(names, forwards)
