"""Loading into optimizers: memory for what the checkpoint has of each parameter, no step is needed before."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.reading.counts import (
    COUNT,
    MOMENTS,
    SKIPPED,
    OurCounts,
    counts_of_ours,
)
from core.dist_checkpointing.reading.read import torch_dtype
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.state.assembly import Assembly, MissingArray, assemble, paths
from core.dist_checkpointing.state.mapping import ShardedObject
from core.dist_checkpointing.state.names import KeyMapping
from core.dist_checkpointing.state.nested import map_leaves
from core.dist_checkpointing.state.optimizers import (
    GROUPS,
    Parameter,
    is_ours,
    map_optimizers,
    parameters,
    set_options,
)

# options that learning rate schedulers add to a group: no sign of another optimizer
SCHEDULER_OPTIONS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}


class OptimizerLoad:
    """One optimizer of torch's: what to read, and what is set once it is read.

    template: the sharded state that is loaded in the optimizer's place.
    Raises ValueError: a parameter that is not in the state beside; a state that has no layout here.
    """

    def __init__(
        self,
        path: str,
        optimizer: torch.optim.Optimizer,
        state: Any,
        stored: StoredCheckpoint,
        key_mapping: KeyMapping,
    ) -> None:
        self._path = path
        self._optimizer = optimizer
        self._stored = stored
        self._key_mapping = key_mapping
        self._parameters = list(parameters(path, optimizer, state))
        # of ours, whose moments torch's AdamW takes over
        self._counts: OurCounts | None = None
        if key_mapping.same and isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            self._counts = counts_of_ours(path, stored)
        self._kinds = self._possible_kinds()
        # parameter -> kind -> the memory that is filled, or the object whose value is set
        self._states: dict[Tensor, dict[str, Tensor | ShardedObject]] = {}
        self.template: dict[str, Any] = {}
        if self._counts is not None:
            self._kinds = [kind for kind in self._kinds if kind in MOMENTS]
            for name in (COUNT, SKIPPED):
                self.template[name] = ShardedObject(f"{path}/{name}", None)
        for parameter in self._parameters:
            if self._counts is None:
                self.template[f"{GROUPS}/{parameter.name}"] = self._object(GROUPS, parameter)
            if self._fits(parameter):
                self._add_states(parameter)

    def _possible_kinds(self) -> list[str]:
        """The names in the checkpoint that may be kinds of state, such as `exp_avg`.

        With a key mapping any part of a key may be one, but for its end where that has a dot, as the name of a
        parameter.
        """
        keys = [*map(key_of, self._stored.metadata), *self._stored.objects]
        kinds: set[str] = set()
        if self._key_mapping.same:
            prefix = f"{self._path}/"
            for key in keys:
                names = key.removeprefix(prefix).split("/")
                if key.startswith(prefix) and len(names) > 1:
                    kinds.add(names[0])
        else:
            for key in keys:
                *folders, name = key.split("/")
                kinds.update(folders)
                if "." not in name:
                    kinds.add(name)
        return sorted(kinds - {GROUPS})

    def _object(self, kind: str, parameter: Parameter) -> ShardedObject:
        return ShardedObject(f"{self._path}/{kind}/{parameter.name}", None)

    def _fits(self, parameter: Parameter) -> bool:
        """Whether the parameter itself is of that shape in the checkpoint; else its states stay as they are."""
        try:
            assembly = assemble(self._key_mapping.source(parameter.leaf.key), self._stored)
        except MissingArray:
            return True
        except ValueError:  # the load reports it for the parameter
            return False
        return assembly.shape == parameter.leaf.global_shape

    def _add_states(self, parameter: Parameter) -> None:
        states = self._states[parameter.tensor] = {}
        for kind in self._kinds:
            key = f"{self._path}/{kind}/{parameter.key}"
            value = self._object(kind, parameter)
            # an array, a value of its own per parameter, or nothing: then the optimizer starts without this state
            source = self._key_mapping.source(key)
            if set(paths(source)) <= self._stored.metadata.keys():
                tensor = states[kind] = self._memory_for(
                    assemble(source, self._stored), kind, parameter
                )
                self.template[f"{kind}/{parameter.name}"] = parameter.laid_out(key, tensor)
            elif getattr(self._key_mapping.source(value.key), "key", None) in self._stored.objects:
                self.template[f"{kind}/{parameter.name}"] = states[kind] = value

    def _memory_for(self, assembly: Assembly, kind: str, parameter: Parameter) -> Tensor:
        """Memory for one state: the optimizer's own, where it has some of this shape and dtype."""
        _, leaf = assembly.leaves[0]
        tensor = parameter.tensor.detach()
        shape = assembly.shape[len(parameter.stack_shape) :]
        dtype = torch_dtype(self._stored.dtype(leaf.stored))
        like_parameter = shape == parameter.shape and kind != "step"
        if like_parameter and leaf.cast and dtype.is_floating_point and tensor.is_floating_point():
            dtype = tensor.dtype
        local_shape = tuple(tensor.shape) if like_parameter else shape
        existing = self._optimizer.state.get(parameter.tensor, {}).get(kind)
        if (
            isinstance(existing, Tensor)
            and tuple(existing.shape) == local_shape
            and existing.dtype == dtype
        ):
            return existing
        if like_parameter:
            return torch.zeros_like(tensor, dtype=dtype)
        # torch counts on the host, unless a graph or a fused kernel does; the options are those of the checkpoint
        options_key = self._key_mapping.value_key(self._object(GROUPS, parameter).key)
        options = self._stored.objects.get(options_key)
        if not isinstance(options, Mapping):
            options = parameter.group
        on_device = kind != "step" or options.get("capturable") or options.get("fused")
        return torch.zeros(shape, dtype=dtype, device=tensor.device if on_device else "cpu")

    def _step_of(self, parameter: Parameter) -> Tensor:
        """torch's count of a parameter's updates, from those of an optimizer of ours."""
        assert self._counts is not None
        group = parameter.group
        on_device = group.get("capturable") or group.get("fused")
        device = parameter.tensor.device if on_device else "cpu"
        count = self._counts.updates - self._counts.behind.get(parameter.name, 0)
        return torch.tensor(float(count), device=device)

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises ValueError: options that are not those of the groups here."""
        # group -> name and options of its first parameter
        first: dict[int, tuple[str, Any]] = {}
        for parameter in self._parameters:
            key = self._object(GROUPS, parameter).key
            if key not in values:
                continue
            name, options = first.setdefault(id(parameter.group), (parameter.name, values[key]))
            if not isinstance(options, Mapping):
                raise ValueError(
                    f"{key} is {options!r}, not the options of a group; use another checkpoint"
                )
            if values[key] != options:
                raise ValueError(
                    f"{key}: in one group with {name} here, whose options are {options} in the checkpoint, and not "
                    f"{values[key]}; group the parameters as they were"
                )
            # options on both sides that the other lacks: this is another optimizer, not another version
            only_saved = options.keys() - parameter.group.keys() - SCHEDULER_OPTIONS
            only_local = parameter.group.keys() - options.keys() - {"params"}
            if only_local and only_saved:
                raise ValueError(
                    f"{key}: an optimizer with {', '.join(sorted(only_saved))} was saved, this one has "
                    f"{', '.join(sorted(only_local))}; make the one that was saved"
                )

    def finish(self, values: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Set states and options, once everything is read."""
        optimizer_state = self._optimizer.state
        for tensor, states in self._states.items():
            loaded: dict[str, Any] = {}
            for kind, state in states.items():
                loaded[kind] = values.get(state.key) if isinstance(state, ShardedObject) else state
            # what the checkpoint does not have must not stay from before
            optimizer_state.pop(tensor, None)
            if loaded:
                optimizer_state[tensor] = loaded
        for parameter in self._parameters:
            if self._counts is not None:
                set_options(parameter.group, self._counts.rates)
                if optimizer_state.get(parameter.tensor):
                    optimizer_state[parameter.tensor]["step"] = self._step_of(parameter)
            set_options(parameter.group, values.get(self._object(GROUPS, parameter).key, {}))
        return self._optimizer


class OptimizerLoads:
    """All optimizers of a state. `state`: the same state with what is to be read in their places."""

    def __init__(self, state: Any, stored: StoredCheckpoint, key_mapping: KeyMapping) -> None:
        self._original = state
        self._loads: dict[str, OptimizerLoad] = {}
        # of optimizers of `core.optimizer`, which lay out states themselves
        self._core_states: dict[str, Any] = {}

        def template_of(path: str, optimizer: Any) -> Any:
            if is_ours(optimizer):
                return self._core_states.setdefault(path, optimizer.sharded_state_dict())
            self._loads[path] = OptimizerLoad(path, optimizer, state, stored, key_mapping)
            return self._loads[path].template

        self.state = map_optimizers(state, template_of)

    def check(self, values: Mapping[str, Any]) -> None:
        for load in self._loads.values():
            load.check(values)

    def finish(
        self, loaded_leaf: Callable[[tuple[str, ...], Any], Any], values: Mapping[str, Any]
    ) -> Any:
        """The original state with `loaded_leaf(path, leaf)` for each leaf, and the optimizers that were filled."""

        def finished(path: tuple[str, ...], leaf: Any) -> Any:
            key = "/".join(path)
            if key in self._loads:
                return self._loads[key].finish(values)
            if key in self._core_states:
                leaf.load_state_dict(map_leaves(self._core_states[key], loaded_leaf, path))
                return leaf
            return loaded_leaf(path, leaf)

        return map_leaves(self._original, finished)
