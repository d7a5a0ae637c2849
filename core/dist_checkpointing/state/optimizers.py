"""Optimizers as leaves of a state: what they keep, by name and layout of the parameters that lie beside them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from core.dist_checkpointing.state.derive import MODEL
from core.dist_checkpointing.state.mapping import ShardedObject, ShardedTensor, map_leaves
from core.dist_checkpointing.state.tensors import is_dtensor, is_sharded

GROUPS = "param_groups"  # beside the kinds of states: options by parameter, for ranks of a pipeline have other groups


@dataclass(frozen=True)
class Parameter:
    """One of an optimizer's, its group, and how it lies in the state beside (plain: alike on all ranks)."""

    tensor: Tensor
    group: dict[str, Any]
    leaf: ShardedTensor
    plain: bool

    @property
    def key(self) -> str:
        """Of its array; `model/` is left out, as in the keys of `core.optimizer`."""
        return self.leaf.key.removeprefix(MODEL)

    @property
    def name(self) -> str:
        """Its own, where it is one layer of a stack, too."""
        stack, rows = self.leaf.stack, self.leaf.global_offset[: self.leaf.prepend_axis_num]
        if stack and self.key.startswith(f"{stack}."):
            return f"{stack}.{rows[0]}{self.key[len(stack) :]}"
        return ".".join([self.key, *map(str, rows)])

    @property
    def lead(self) -> tuple[int, ...]:
        """The stack axes of the whole."""
        return self.leaf.global_shape[: self.leaf.prepend_axis_num]

    @property
    def shape(self) -> tuple[int, ...]:
        """The true shape of the whole."""
        return self.leaf.global_shape[self.leaf.prepend_axis_num :]

    def laid_out(self, key: str, value: Tensor) -> Tensor | ShardedTensor:
        """A state of it: as the parameter lies, or, of another shape, the same on all that hold it. Plain ones are
        compared across ranks under the path of their names, which is `key`.

        Raises ValueError: another shape than that of a parameter of which only a part is here.
        """
        leaf, axes = self.leaf, self.leaf.prepend_axis_num
        if value.shape == self.tensor.shape:
            if self.plain:
                return value
            part = value if is_dtensor(value) else value[tuple(slice(0, n) for n in leaf.data.shape)]
            return replace(leaf, key=key, data=part, local=None)
        whole = tuple(leaf.data.shape) == self.shape and not is_dtensor(leaf.data)
        if value.dim() and not whole and not is_dtensor(value):
            raise ValueError(
                f"{key}: a state of shape {list(value.shape)} has no layout where its parameter is spread over ranks "
                f"({list(self.shape)} in all): it is of this rank's part alone, as Adafactor's rows and columns are; "
                "leave the optimizer out, use one whose states have the shapes of the parameters, or a layout under "
                "which every rank holds whole parameters"
            )
        if self.plain:
            return value
        offset = leaf.global_offset[:axes] + (0,) * value.dim()
        return ShardedTensor(key, value, (*self.lead, *value.shape), offset, 0, axes, stack=leaf.stack)


def parameters(path: str, optimizer: torch.optim.Optimizer, state: Any) -> Iterator[Parameter]:
    """Each parameter of an optimizer, found in the state by its memory.

    Raises ValueError: one that is not there.
    """
    held: dict[Any, list[tuple[ShardedTensor, bool]]] = {}

    def note(where: tuple[str, ...], leaf: Any) -> None:
        if plain := isinstance(leaf, Tensor) and not is_sharded(leaf):
            leaf = ShardedTensor("/".join(where), leaf.detach(), tuple(leaf.shape), (0,) * leaf.dim())
        if isinstance(leaf, ShardedTensor):
            held.setdefault(_memory(leaf.data if leaf.local is None else leaf.local), []).append((leaf, plain))

    map_leaves(state, note)
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if not (leaves := held.get(_memory(tensor))):
                raise ValueError(
                    f"{path}: a parameter of shape {list(tensor.shape)} of group {number} is not in the state; give "
                    f"the model beside: {{'model': model.sharded_state_dict(), '{path}': optimizer}}; for FSDP1, "
                    "whose parameters are flat, give what get_state_dict(model, optimizer) of "
                    "torch.distributed.checkpoint.state_dict makes, weights and states by name"
                )
            # several: two names of one parameter, of which the first counts, or parts without elements, each by turns
            yield Parameter(tensor, group, *(leaves.pop(0) if len(leaves) > 1 else leaves[0]))


def _memory(tensor: Any) -> tuple[Any, ...]:
    """Equal for a parameter and for what a state dict has of it."""
    local = tensor.detach().to_local() if is_dtensor(tensor) else tensor
    place = local.untyped_storage().data_ptr(), local.storage_offset(), local.stride(), tuple(local.shape)
    return *place, tuple(tensor.shape), tensor.dtype


def is_ours(leaf: Any) -> bool:
    """Whether an optimizer says itself what it keeps, as those of `core.optimizer` do."""
    return hasattr(leaf, "sharded_state_dict") and hasattr(leaf, "step") and not isinstance(leaf, nn.Module)


def map_optimizers(state: Any, change: Callable[[str, Any], Any]) -> Any:
    """A nested state with every optimizer changed."""

    def one(path: tuple[str, ...], leaf: Any) -> Any:
        found = is_ours(leaf) or isinstance(leaf, torch.optim.Optimizer)
        return change("/".join(path), leaf) if found else leaf

    return map_leaves(state, one)


def to_save(state: Any) -> Any:
    """A state with what each optimizer keeps in its place: kind of state -> name of the parameter -> its part."""

    def one(path: str, optimizer: Any) -> Any:
        return optimizer.sharded_state_dict() if is_ours(optimizer) else _kept(path, optimizer, state)

    return map_optimizers(state, one)


def _kept(path: str, optimizer: torch.optim.Optimizer, state: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {GROUPS: {}}
    every = list(parameters(path, optimizer, state))
    _check_stacks(path, optimizer, every)
    for p in every:
        options = {key: _option(value) for key, value in p.group.items() if key != "params"}
        found[GROUPS][p.name] = ShardedObject(f"{path}/{GROUPS}/{p.name}", options)
        for kind, value in optimizer.state.get(p.tensor, {}).items():
            if isinstance(value, Tensor):
                kept: Any = p.laid_out(f"{path}/{kind}/{p.key}", value)
            elif isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
                raise ValueError(
                    f"{path}/{kind}/{p.name} is a {type(value).__name__} of tensors ({type(optimizer).__name__}), "
                    "which has no layout by parameter; leave the optimizer out, or use one with states by parameter"
                )
            else:
                kept = ShardedObject(f"{path}/{kind}/{p.name}", value)
            found.setdefault(str(kind), {})[p.name] = kept
    return found


def _check_stacks(path: str, optimizer: torch.optim.Optimizer, every: list[Parameter]) -> None:
    """Raises ValueError: layers of one stack, which is one array, with states and without."""
    first: dict[str, Parameter] = {}
    for p in every:
        other = first.setdefault(p.key, p)
        have, had = (sorted(optimizer.state.get(one.tensor, {})) for one in (p, other))
        if have != had:
            raise ValueError(
                f"{path}: {p.name} has the states {have}, {other.name} has {had}, and layers of a stack are one "
                "array; give layers without a gradient zeros once, or, where every rank holds the whole model, "
                "model.state_dict(), whose layers are arrays of their own"
            )


def _option(value: Any) -> Any:
    """A rate may be a tensor, for graphs."""
    return value.item() if isinstance(value, Tensor) and not value.dim() else value


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Into a group, a tensor's value into the tensor."""
    for key, value in options.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value
