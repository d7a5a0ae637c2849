"""Run a region again in backward instead of keeping its activations; at most once per microbatch.

No unpack hooks: the region is one autograd Function whose inputs are its tensors and its parameters, so
gradients, `torch.autograd.grad`, post-accumulate hooks and DDP see an ordinary node.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.autograd.bag import StageContext

Policy = str | Sequence[str | type[nn.Module]]


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return torch.get_rng_state(), own


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)


class _Region:
    """Everything that a second run must find as the first did."""

    def __init__(self, fn: Callable, spec: Any, leaves: list, stage: StageContext | None) -> None:
        self.fn, self.spec, self.stage = fn, spec, stage
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        self.device = first.device if first is not None else torch.device("cpu")
        self.snapshot = stage.snapshot() if stage is not None else None
        self.random = _random_state(self.device)
        kind = self.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.out_spec: Any = None
        self.out_constants: list = []

    def call(self, tensors: Sequence[Tensor]) -> list:
        """Run on these tensors; returns the flat outputs."""
        rest = iter(tensors)
        pairs = zip(self.is_tensor, self.constants, strict=True)
        leaves = [next(rest) if is_tensor else constant for is_tensor, constant in pairs]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        outputs, self.out_spec = pytree.tree_flatten(self.fn(*args, **kwargs))
        return outputs

    def call_again(self, tensors: Sequence[Tensor]) -> list:
        """The second run: same bag, same random numbers, same autocast; the present is put back after it."""
        now, now_stage = _random_state(self.device), self.stage.snapshot() if self.stage else None
        kind, dtype, enabled = self.autocast
        again: AbstractContextManager = torch.autocast(kind, dtype=dtype, enabled=enabled)
        _set_random_state(self.device, self.random)
        if self.stage is not None:
            self.stage.restore(self.snapshot)  # type: ignore[arg-type]
        try:
            with torch.enable_grad(), again:
                return self.call(tensors)
        finally:
            _set_random_state(self.device, now)
            if self.stage is not None:
                self.stage.restore(now_stage)  # type: ignore[arg-type]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: _Region, count: int, *tensors: Tensor) -> Any:
        inputs, ctx.parameters = tensors[:count], tensors[count:]
        outputs = region.call(inputs)
        region.out_constants = [None if isinstance(out, Tensor) else out for out in outputs]
        ctx.region = region
        ctx.save_for_backward(*inputs)
        # an input handed through unchanged must not become an output of this node that shares its identity
        made = tuple(out.view_as(out) if any(out is x for x in inputs) else out for out in outputs if _is(out))
        ctx.mark_non_differentiable(*(out for out in made if not out.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        region: _Region = ctx.region
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        outputs = [out for out in region.call_again(inputs) if _is(out)]
        wanted = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        sources = [t for t in (*inputs, *ctx.parameters) if t.requires_grad]
        found: list = [None] * len(sources)
        if wanted and sources:
            found = list(
                torch.autograd.grad([o for o, _ in wanted], sources, [g for _, g in wanted], allow_unused=True)
            )
        rest = iter(found)
        return None, None, *(next(rest) if t.requires_grad else None for t in (*inputs, *ctx.parameters))


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def recompute(
    fn: Callable,
    *args: Any,
    stage: StageContext | None = None,
    parameters: Sequence[Tensor] = (),
    **kwargs: Any,
) -> Any:
    """`fn(*args, **kwargs)` that keeps only its inputs and runs again, once, inside backward.

    Arguments and results are any nesting of tensors and constants. `parameters` names every tensor that `fn`
    reads from elsewhere and that needs a gradient (a module's parameters). No input needs to require a
    gradient. Random numbers, the stage's microbatch and bag, and autocast are as in the first run.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    region = _Region(fn, spec, leaves, stage)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    made = iter(_Recompute.apply(region, len(tensors), *tensors, *parameters))
    rebuilt = [next(made) if constant is None else constant for constant in region.out_constants]
    return pytree.tree_unflatten(rebuilt, region.out_spec)


class RecomputeHandle:
    """The regions of a module that a policy wrapped; `remove()` gives them their own forward back."""

    def __init__(self, names: list[str], modules: list[nn.Module]) -> None:
        self.names, self._modules = names, modules

    def remove(self) -> None:
        """Undo: activations are kept again."""
        for module in self._modules:
            del module.forward
        self._modules = []


def _matches(name: str, module: nn.Module, parent: nn.Module | None, policy: Policy) -> bool:
    if policy == "layer":
        return isinstance(parent, (nn.ModuleList, nn.ModuleDict))
    if policy == "selective":
        return name.rpartition(".")[2] == "core_attention"
    last = name.rpartition(".")[2]
    return any(
        isinstance(module, want) if isinstance(want, type) else want in (name, last) or fnmatch(name, want)
        for want in policy
    )


def apply_recompute(module: nn.Module, policy: Policy, *, stage: StageContext | None = None) -> RecomputeHandle:
    """Recompute regions of any module, in place, parameter names unchanged.

    policy: "none"; "layer" (every element of a ModuleList or ModuleDict); "selective" (every
    `core_attention`); or names (full, last part, or a pattern such as "*.mlp") and module classes.
    A region inside a region is not wrapped again: everything runs at most twice.
    Raises ValueError: an unknown policy, or a name or class that matches nothing.
    """
    if policy == "none":
        return RecomputeHandle([], [])
    if isinstance(policy, str) and policy not in ("layer", "selective"):
        raise ValueError(f"recompute={policy!r}: known are 'none', 'selective', 'layer' and lists of module names")
    names: list[str] = []
    modules: list[nn.Module] = []
    parents = {f"{n}.{c}" if n else c: m for n, m in module.named_modules() for c, _ in m.named_children()}
    for name, child in module.named_modules():
        inside = any(name == outer or name.startswith(f"{outer}.") for outer in names)
        if name and not inside and _matches(name, child, parents.get(name), policy):
            names.append(name)
            modules.append(child)
    if not names:
        known = sorted({name.rpartition(".")[2] for name, _ in module.named_modules() if name})
        raise ValueError(f"recompute={policy!r} matches no module; names here: {', '.join(known)}")
    for child in modules:
        child.forward = _recomputing(child, stage)
    return RecomputeHandle(names, modules)


def _recomputing(module: nn.Module, stage: StageContext | None) -> Callable:
    plain = module.forward
    parameters = [p for p in module.parameters() if p.requires_grad]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return recompute(plain, *args, stage=stage, parameters=parameters, **kwargs)

    return forward
