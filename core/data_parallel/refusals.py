"""Parameters that a `DataParallel` cannot sum, or that got nothing to sum, told to the user."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import isfunction, unwrap
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import Parameter

from core.autograd.gradients import has_main_grad
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import Group, all_gather_objects
from core.parallel_state.modules import Modules, named_parameters


def refuse_owned(names: Mapping[Parameter, str]) -> None:
    """Raise ValueError: parameters that another object sums already."""
    owned = [name for parameter, name in names.items() if has_main_grad(parameter)]
    if owned:
        raise ValueError(
            f"DataParallel: {owned[0]} and {len(owned) - 1} more of {len(names)} parameters already have a "
            "main_grad: a parameter belongs to 1 group only; remove() the object that made it first"
        )


def refuse_spread(names: Mapping[Parameter, str]) -> None:
    """Raise ValueError: parameters that torch spreads, before DataParallel or after it (DTensors)."""
    spread = [name for parameter, name in names.items() if hasattr(parameter, "placements")]
    if spread:
        raise ValueError(
            f"DataParallel: {spread[0]} and {len(spread) - 1} more of {len(names)} parameters are DTensors, which "
            "torch's fully_shard or parallelize_module spreads already; leave that out: zero_stage=3 is FSDP's "
            "full sharding"
        )


def refuse_unknown(unknown: Collection[int], module: Modules) -> None:
    """Raise ValueError: trainable parameters (their ids) that were not there, or not trainable, at the start."""
    if not unknown:
        return
    new = {p: name for name, p in named_parameters(module) if id(p) in unknown}
    refuse_spread(new)
    names = list(new.values())
    raise ValueError(
        f"DataParallel: {len(unknown)} trainable parameters ({', '.join(names[:3]) or 'of another module'}) "
        "are summed by nobody: replaced (load_state_dict(assign=True)?), added or unfrozen later; remove() "
        "this and make it anew, with its optimizer"
    )


def refuse_unused(unused: Sequence[str], world: Group | None) -> None:
    """Raise ValueError, on every rank: some rank has parameters without a gradient. All-gather over the world."""
    descriptions = []
    for rank, names in enumerate(all_gather_objects(unused, world)):
        if names:
            descriptions.append(f"{names[0]} on rank {rank} ({len(names)} there)")
    if descriptions:
        raise ValueError(
            f"parameters without a gradient in this step: {'; '.join(descriptions)}; freeze them, use them, or leave "
            "require_gradients off"
        )


class RootHook:
    """A hook of ours on a program's module, called as `hook` is: whoever pickles the whole module meets it first."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __deepcopy__(self, memo: dict) -> "RootHook":
        return self  # as a function

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a module under DataParallel cannot be pickled whole (torch.save(model)): its weights lie in buckets, "
            "and hooks gather and sum them. Save model.state_dict(), or core.dist_checkpointing.save, which every "
            "layout opens; shard.remove() first gives a plain module"
        )


def refuse_sparse(optimizer: torch.optim.Optimizer, stages: Iterable[nn.Module]) -> None:
    """Raise ValueError: torch's optimizer of sparse gradients. A program's own that looks for them is told."""
    asks = _asks_of_sparse(type(optimizer))
    if asks and any(getattr(part, "sparse", False) is True for m in stages for part in m.modules()):
        warnings.warn(
            f"{type(optimizer).__name__} asks whether gradients are sparse, and under DataParallel all are dense, of "
            "nn.Embedding(sparse=True) as well: it takes its other branch, and updates rows that no token has "
            "(momentum, decay). Skip rows whose gradient is 0, or keep the table outside of DataParallel",
            stacklevel=program_level(),
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients, and under DataParallel all are dense: they are summed in buckets, of "
            "nn.Embedding(sparse=True) as well. Take torch.optim.AdamW or Adam, or core.optimizer.ShardedAdamW"
        )


def _asks_of_sparse(kind: type) -> bool:
    """Whether methods of a program's own optimizer take sparse gradients apart."""
    return any(
        {"coalesce", "_indices", "_values"} & {*unwrap(method).__code__.co_names}
        for cls in kind.__mro__
        if not cls.__module__.startswith(("torch.", "core."))
        for method in vars(cls).values()
        if isfunction(method)
    )
