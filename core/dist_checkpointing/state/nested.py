"""A nested state dict, walked leaf by leaf."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from core.dist_checkpointing.state.leaves import SAME
from core.dist_checkpointing.state.mapping import ShardedObject, ShardedTensor


def map_leaves(
    state: Any, change: Callable[[tuple[str, ...], Any], Any], path: tuple[str, ...] = ()
) -> Any:
    """A nested state with every leaf replaced by `change(path, leaf)`.

    Mappings are walked through, and lists and tuples that hold tensors somewhere, an item's name being its position;
    other lists and tuples are leaves.
    Raises ValueError: names that are no text or number, two that are written alike.
    """
    if isinstance(state, Mapping):
        _check_names(path, state)
        return {
            name: map_leaves(value, change, (*path, str(name))) for name, value in state.items()
        }
    if isinstance(state, (list, tuple)) and _holds_tensors(state):
        items = [
            map_leaves(value, change, (*path, str(number))) for number, value in enumerate(state)
        ]
        if isinstance(state, list):
            return items
        is_namedtuple = hasattr(state, "_fields")
        if is_namedtuple:
            return type(state)(*items)
        return tuple(items)
    return change(path, state)


def _check_names(path: tuple[str, ...], state: Mapping[Any, Any]) -> None:
    first: dict[str, Any] = {}
    for name in state:
        if not (name is None or isinstance(name, (str, int, float))):
            raise ValueError(
                f"{'/'.join(path) or 'the state'}: the key {name!r} is a {type(name).__name__}; use texts or numbers"
            )
        if first.setdefault(str(name), name) is not name:
            raise ValueError(
                f"{'/'.join(path) or 'the state'}: the keys {first[str(name)]!r} and {name!r} are written alike in "
                "a checkpoint; rename one of them"
            )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        # a list of numbers may be long: one look at the set of its types tells that there is no tensor in it
        return not set(map(type, value)) <= {*SAME, float} and any(map(_holds_tensors, value))
    return isinstance(value, (Tensor, np.ndarray, ShardedTensor, ShardedObject)) or hasattr(
        value, "param_groups"
    )
