"""Loading into optimizers: memory for what the checkpoint has of each parameter, no step is needed before."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.reading.read import torch_dtype
from core.dist_checkpointing.reading.stored import Stored
from core.dist_checkpointing.state.assembly import Absent, Assembly, assemble, paths
from core.dist_checkpointing.state.mapping import ShardedObject, map_leaves
from core.dist_checkpointing.state.names import Names
from core.dist_checkpointing.state.optimizers import (
    GROUPS,
    Parameter,
    is_ours,
    map_optimizers,
    parameters,
    set_options,
)

OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}


class OptimizerLoad:
    """One optimizer of torch's: what to read, and what is set once it is read.

    Raises ValueError: a parameter that is not in the state beside; a state that has no layout here.
    """

    def __init__(self, path: str, optimizer: torch.optim.Optimizer, state: Any, stored: Stored, names: Names) -> None:
        self._path, self._optimizer, self._stored, self._names = path, optimizer, stored, names
        self._parameters = list(parameters(path, optimizer, state))
        self._kinds = self._all_kinds()
        self._kept: dict[Tensor, dict[str, Tensor | ShardedObject]] = {}
        self.template: dict[str, Any] = {}
        for parameter in self._parameters:
            self.template[f"{GROUPS}/{parameter.name}"] = self._object(GROUPS, parameter)
            if self._fits(parameter):
                self._add(parameter)

    def _all_kinds(self) -> list[str]:
        """What may be a kind of state in the checkpoint: with other names there, any part of a key, but for its end
        where that has a dot, as the name of a parameter."""
        keys = [*map(key_of, self._stored.metadata), *self._stored.objects]
        prefix = f"{self._path}/" if self._names.same else ""
        below = [key.removeprefix(prefix).split("/") for key in keys if key.startswith(prefix)]
        if self._names.same:
            return sorted({parts[0] for parts in below if len(parts) > 1} - {GROUPS})
        return sorted({kind for *parts, last in below for kind in (*parts, *[last] * ("." not in last))} - {GROUPS})

    def _object(self, kind: str, parameter: Parameter) -> ShardedObject:
        return ShardedObject(f"{self._path}/{kind}/{parameter.name}", None)

    def _fits(self, parameter: Parameter) -> bool:
        """Whether the parameter itself is of that shape in the checkpoint; else its states stay as they are."""
        try:
            return assemble(self._names.form(parameter.leaf.key), self._stored).shape == parameter.leaf.global_shape
        except Absent:
            return True
        except ValueError:  # which is told of the parameter
            return False

    def _add(self, parameter: Parameter) -> None:
        kept = self._kept[parameter.tensor] = {}
        for kind in self._kinds:
            key, value = f"{self._path}/{kind}/{parameter.key}", self._object(kind, parameter)
            if set(paths(form := self._names.form(key))) <= self._stored.metadata.keys():
                tensor = kept[kind] = self._memory(assemble(form, self._stored), kind, parameter)
                self.template[f"{kind}/{parameter.name}"] = parameter.laid_out(key, tensor)
            elif getattr(self._names.form(value.key), "key", None) in self._stored.objects:
                self.template[f"{kind}/{parameter.name}"] = kept[kind] = value

    def _memory(self, found: Assembly, kind: str, parameter: Parameter) -> Tensor:
        """For one state: the optimizer's own, where it has some like it."""
        (_, leaf), like = found.leaves[0], parameter.tensor.detach()
        shape = found.shape[len(parameter.lead) :]
        dtype, spread = torch_dtype(self._stored.dtype(leaf.found)), shape == parameter.shape and kind != "step"
        if spread and leaf.cast and dtype.is_floating_point and like.is_floating_point():
            dtype = like.dtype
        local = tuple(like.shape) if spread else shape
        held = self._optimizer.state.get(parameter.tensor, {}).get(kind)
        if isinstance(held, Tensor) and tuple(held.shape) == local and held.dtype == dtype:
            return held
        if spread:
            return torch.zeros_like(like, dtype=dtype)
        # torch counts on the host, unless a graph or a fused kernel does; the options are those of the checkpoint
        name = self._names.key(self._object(GROUPS, parameter).key)
        options = self._stored.objects.get(name)
        options = options if isinstance(options, Mapping) else parameter.group
        there = kind != "step" or options.get("capturable") or options.get("fused")
        return torch.zeros(shape, dtype=dtype, device=like.device if there else "cpu")

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises ValueError: options that are not those of the groups here."""
        first: dict[int, tuple[str, Any]] = {}
        for parameter in self._parameters:
            key = self._object(GROUPS, parameter).key
            if key not in values:
                continue
            name, options = first.setdefault(id(parameter.group), (parameter.name, values[key]))
            if not isinstance(options, Mapping):
                raise ValueError(f"{key} is {options!r}, not the options of a group; use another checkpoint")
            if values[key] != options:
                raise ValueError(
                    f"{key}: in one group with {name} here, whose options are {options} in the checkpoint, and not "
                    f"{values[key]}; group the parameters as they were"
                )
            more, less = options.keys() - parameter.group.keys(), parameter.group.keys() - options.keys() - {"params"}
            if less and (more := more - OF_SCHEDULERS):
                raise ValueError(
                    f"{key}: an optimizer with {', '.join(sorted(more))} was saved, this one has "
                    f"{', '.join(sorted(less))}; make the one that was saved"
                )

    def finish(self, values: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Set states and options, once everything is read."""
        state = self._optimizer.state
        for tensor, kinds in self._kept.items():
            state.pop(tensor, None)
            kept = {k: values.get(v.key) if isinstance(v, ShardedObject) else v for k, v in kinds.items()}
            if kept:
                state[tensor] = kept
        for parameter in self._parameters:
            set_options(parameter.group, values.get(self._object(GROUPS, parameter).key, {}))
        return self._optimizer


class OptimizerLoads:
    """All optimizers of a state. `state`: it with what is to be read in their places."""

    def __init__(self, state: Any, stored: Stored, names: Names) -> None:
        self._given = state
        self._loads: dict[str, OptimizerLoad] = {}
        self._ours: dict[str, Any] = {}

        def one(path: str, optimizer: Any) -> Any:
            if is_ours(optimizer):
                return self._ours.setdefault(path, optimizer.sharded_state_dict())
            self._loads[path] = OptimizerLoad(path, optimizer, state, stored, names)
            return self._loads[path].template

        self.state = map_optimizers(state, one)

    def check(self, values: Mapping[str, Any]) -> None:
        for load in self._loads.values():
            load.check(values)

    def finish(self, value: Callable[[tuple[str, ...], Any], Any], values: Mapping[str, Any]) -> Any:
        """The given state with what `value` says of each leaf, and the optimizers that were filled."""

        def one(path: tuple[str, ...], leaf: Any) -> Any:
            key = "/".join(path)
            if key in self._loads:
                return self._loads[key].finish(values)
            if key in self._ours:
                leaf.load_state_dict(map_leaves(self._ours[key], value, path))
                return leaf
            return value(path, leaf)

        return map_leaves(self._given, one)
