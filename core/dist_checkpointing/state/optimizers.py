"""Optimizers as leaves of a state: their states, by name and layout of the parameters that lie beside them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from core.dist_checkpointing.state.derive import MODEL
from core.dist_checkpointing.state.mapping import ShardedObject, ShardedTensor
from core.dist_checkpointing.state.nested import map_leaves
from core.dist_checkpointing.state.tensors import is_dtensor, is_sharded

# beside the kinds of states: options by parameter, because ranks of a pipeline have other groups
GROUPS = "param_groups"


@dataclass(frozen=True)
class Parameter:
    """A parameter of a torch optimizer, its group, and its leaf in the state; replicated: the same on all ranks."""

    tensor: Tensor
    group: dict[str, Any]
    leaf: ShardedTensor
    replicated: bool

    @property
    def key(self) -> str:
        """Of its array; `model/` is left out, as in the keys of `core.optimizer`."""
        return self.leaf.key.removeprefix(MODEL)

    @property
    def name(self) -> str:
        """Its own name, also where it is one layer of a stack: `decoder.layers.3.norm.weight`."""
        stack = self.leaf.stack
        rows = self.leaf.global_offset[: self.leaf.prepend_axis_num]
        if stack and self.key.startswith(f"{stack}."):
            if self.leaf.layers:
                number = self.leaf.layers[rows[0]]
            else:
                number = rows[0]
            return f"{stack}.{number}{self.key[len(stack) :]}"
        return ".".join([self.key, *map(str, rows)])

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The stack axes of the full array."""
        return self.leaf.global_shape[: self.leaf.prepend_axis_num]

    @property
    def shape(self) -> tuple[int, ...]:
        """The true shape of the full parameter."""
        return self.leaf.global_shape[self.leaf.prepend_axis_num :]

    def laid_out(self, key: str, value: Tensor) -> Tensor | ShardedTensor:
        """A state of it: as the parameter lies, or, of another shape, the same on all ranks that hold it.

        Replicated ones are compared across ranks under the path of their names, which is `key`.
        Raises ValueError: another shape than that of a parameter of which only a shard is here.
        """
        leaf = self.leaf
        axes = self.leaf.prepend_axis_num
        # moments have the parameter's shape and lie as it does
        if value.shape == self.tensor.shape:
            if self.replicated:
                return value
            # without the padded rows of a vocabulary
            if not is_dtensor(value):
                value = value[tuple(slice(0, size) for size in leaf.data.shape)]
            return replace(leaf, key=key, data=value, local=None)
        # a step count has no dims; factored moments can be saved only where each rank holds the full parameter
        is_complete = tuple(leaf.data.shape) == self.shape and not is_dtensor(leaf.data)
        if value.dim() and not is_complete and not is_dtensor(value):
            raise ValueError(
                f"{key}: a state of shape {list(value.shape)} has no layout where its parameter is spread over ranks "
                f"({list(self.shape)} in all): it is of this rank's part alone, as Adafactor's rows and columns are; "
                "leave the optimizer out, use one whose states have the shapes of the parameters, or a layout under "
                "which every rank holds whole parameters"
            )
        if self.replicated:
            return value
        offset = leaf.global_offset[:axes] + (0,) * value.dim()
        shape = (*self.stack_shape, *value.shape)
        return ShardedTensor(
            key,
            value,
            shape,
            offset,
            0,
            axes,
            stack=leaf.stack,
            layers=leaf.layers,
            depth=leaf.depth,
        )


def parameters(path: str, optimizer: torch.optim.Optimizer, state: Any) -> Iterator[Parameter]:
    """Each parameter of an optimizer, found in the state by its memory.

    Raises ValueError: one that is not there.
    """
    leaves_by_memory: dict[Any, list[tuple[ShardedTensor, bool]]] = {}

    def remember(leaf_path: tuple[str, ...], leaf: Any) -> None:
        replicated = isinstance(leaf, Tensor) and not is_sharded(leaf)
        if replicated:
            leaf = ShardedTensor(
                "/".join(leaf_path), leaf.detach(), tuple(leaf.shape), (0,) * leaf.dim()
            )
        if isinstance(leaf, ShardedTensor):
            tensor = leaf.data if leaf.local is None else leaf.local
            leaves_by_memory.setdefault(_memory_of(tensor), []).append((leaf, replicated))

    map_leaves(state, remember)
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            leaves = leaves_by_memory.get(_memory_of(tensor))
            if not leaves:
                raise ValueError(
                    f"{path}: a parameter of shape {list(tensor.shape)} of group {number} is not in the state; give "
                    f"the model beside: {{'model': model.sharded_state_dict(), '{path}': optimizer}} (of another "
                    "module than a GPTModel dist_checkpointing.sharded_state_dict(module, ps)); at ZeRO stage 3, "
                    "where a rank keeps parts, model.state_dict(), whole weights (an optimizer of core.optimizer "
                    "saves parts); for FSDP1, whose parameters are flat, what get_state_dict(model, optimizer) of "
                    "torch.distributed.checkpoint.state_dict gives, weights and states by name"
                )
            # several leaves: two names of one parameter, of which the first counts, or shards without elements, which
            # all have the same address: each parameter takes the next
            leaf, replicated = leaves.pop(0) if len(leaves) > 1 else leaves[0]
            yield Parameter(tensor, group, leaf, replicated)


def _memory_of(tensor: Any) -> tuple[Any, ...]:
    """Equal for a parameter and for what a state dict has of it: address, strides, shapes and dtype."""
    local = tensor.detach().to_local() if is_dtensor(tensor) else tensor
    address = local.untyped_storage().data_ptr(), local.storage_offset()
    return *address, local.stride(), tuple(local.shape), tuple(tensor.shape), tensor.dtype


def is_ours(leaf: Any) -> bool:
    """Whether an optimizer gives its states itself, as those of `core.optimizer` do."""
    return (
        hasattr(leaf, "sharded_state_dict")
        and hasattr(leaf, "step")
        and not isinstance(leaf, nn.Module)
    )


def map_optimizers(state: Any, change: Callable[[str, Any], Any]) -> Any:
    """A nested state with every optimizer replaced by `change(path, optimizer)`."""

    def change_optimizer(path: tuple[str, ...], leaf: Any) -> Any:
        if is_ours(leaf) or isinstance(leaf, torch.optim.Optimizer):
            return change("/".join(path), leaf)
        return leaf

    return map_leaves(state, change_optimizer)


def to_save(state: Any) -> Any:
    """A state with each optimizer's states in its place: kind of state -> name of the parameter -> its shard."""

    def states_of(path: str, optimizer: Any) -> Any:
        if is_ours(optimizer):
            return optimizer.sharded_state_dict()
        return _torch_optimizer_states(path, optimizer, state)

    return map_optimizers(state, states_of)


def _torch_optimizer_states(
    path: str, optimizer: torch.optim.Optimizer, state: Any
) -> dict[str, dict[str, Any]]:
    """Kind -> name -> shard or value; under `param_groups` the options of each parameter's group."""
    states: dict[str, dict[str, Any]] = {GROUPS: {}}
    all_parameters = list(parameters(path, optimizer, state))
    _check_stacks(path, optimizer, all_parameters)
    for parameter in all_parameters:
        name = parameter.name
        options = {key: _option(value) for key, value in parameter.group.items() if key != "params"}
        states[GROUPS][name] = ShardedObject(f"{path}/{GROUPS}/{name}", options)
        for kind, value in optimizer.state.get(parameter.tensor, {}).items():
            saved: Any
            if isinstance(value, Tensor):
                saved = parameter.laid_out(f"{path}/{kind}/{parameter.key}", value)
            elif isinstance(value, (list, tuple)) and any(
                isinstance(item, Tensor) for item in value
            ):
                raise ValueError(
                    f"{path}/{kind}/{name} is a {type(value).__name__} of tensors ({type(optimizer).__name__}), "
                    "which has no layout by parameter; leave the optimizer out, or use one with states by parameter"
                )
            else:
                saved = ShardedObject(f"{path}/{kind}/{name}", value)
            states.setdefault(str(kind), {})[name] = saved
    return states


def _check_stacks(
    path: str, optimizer: torch.optim.Optimizer, all_parameters: list[Parameter]
) -> None:
    """Raises ValueError: layers of one stack, which is one array, with states and without."""
    first: dict[str, Parameter] = {}
    for parameter in all_parameters:
        other = first.setdefault(parameter.key, parameter)
        kinds = sorted(optimizer.state.get(parameter.tensor, {}))
        other_kinds = sorted(optimizer.state.get(other.tensor, {}))
        if kinds != other_kinds:
            raise ValueError(
                f"{path}: {parameter.name} has the states {kinds}, {other.name} has {other_kinds}, and layers of a "
                "stack are one array; give layers without a gradient zeros once, or, where every rank holds the "
                "whole model, model.state_dict(), whose layers are arrays of their own"
            )


def _option(value: Any) -> Any:
    """A learning rate may be a tensor, for graphs: it is saved as a number."""
    if isinstance(value, Tensor) and not value.dim():
        return value.item()
    return value


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Copy options into a parameter group; where the group has a tensor, into that tensor."""
    for key, value in options.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value
