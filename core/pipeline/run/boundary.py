"""What crosses the boundary between two stages: tensors in any nesting, dataclasses included, and plain constants.

A tensor says itself, by `requires_grad`, whether it wants a gradient from the next stage.
"""

import dataclasses
import enum
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, type, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
)


class _Opened:
    """A dataclass's instance as a node of the nesting: the user's class need not be registered anywhere."""

    def __init__(self, kind: type, fields: dict[str, Any]) -> None:
        self.kind, self.fields = kind, fields


def _close(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    made: Any = object.__new__(kind)  # as it was: nobody's __init__ or __post_init__ runs again
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(
    _Opened, lambda node: (list(node.fields.values()), (node.kind, tuple(node.fields))), _close
)


def _is_open(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _open(value: Any) -> Any:
    if not _is_open(value):
        return value
    names = [*(f.name for f in dataclasses.fields(value)), *getattr(value, "__dict__", ())]
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return _Opened(type(value), {name: pytree.tree_map(_open, field) for name, field in fields.items()})


def flatten(value: Any) -> tuple[list[Any], Any]:
    """As torch's `tree_flatten`, with dataclasses as nodes; its `tree_unflatten` gives them back."""
    leaves, spec = pytree.tree_flatten(value)
    if any(_is_open(leaf) for leaf in leaves):
        return pytree.tree_flatten(pytree.tree_map(_open, value))
    return leaves, spec


def tree_map(fn: Callable[[Any], Any], value: Any) -> Any:
    """`fn` of every leaf, in the nesting of `value`."""
    leaves, spec = flatten(value)
    return pytree.tree_unflatten([fn(leaf) for leaf in leaves], spec)


class _Search(pickle.Pickler):
    """Looks through an object for tensors."""

    found = False

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        self.found = True
        return "tensor"


def check_leaf(stage: int, leaf: Any) -> None:
    """Raise ValueError for what cannot be handed to the next stage; with the remedy."""
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided or leaf.is_nested:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise ValueError(
                f"stage {stage} returns a {kind} tensor, and only dense tensors go from stage to stage; return its "
                "parts (values, offsets, ...) or a padded one, and make it again in the next stage"
            )
        return
    if isinstance(leaf, _PLAIN):
        return
    search = _Search(io.BytesIO())
    try:
        search.dump(leaf)
        problem = "that holds a tensor, whose gradient would be nobody's" if search.found else ""
    except Exception as error:
        problem = f"that is neither a tensor nor a plain constant ({error})"
    if problem:
        raise ValueError(
            f"stage {stage} returns a {type(leaf).__module__}.{type(leaf).__qualname__} {problem}; return tensors "
            "and constants in tuples, lists, mappings or dataclasses"
        )


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Tensor:
        return gy


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, where: str) -> Tensor:
        ctx.where = where
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.where} was used outside of its stage, which is recomputed as a whole: it would get no gradient; "
            "return it from the stage, or use another recompute policy"
        )


def left(value: Tensor, where: str) -> Tensor:
    """A tensor that a forward without a graph leaves on a module: to be read, not to be differentiated."""
    with torch.enable_grad():
        made: Tensor = _Left.apply(torch.zeros((), requires_grad=True), value, where)
    return made


def alias(value: Any) -> Any:
    """What a stage is given for what it received: as in one process it may be written to in place.

    A leaf that wants a gradient may not; this has the same memory and the leaf as its input. 3 us.
    """
    return _Alias.apply(value) if isinstance(value, Tensor) and value.requires_grad else value


def copied(value: Any) -> Any:
    """A copy, for a stage that may write into what it must start from again."""
    return value.clone() if isinstance(value, Tensor) else value
