"""What crosses the boundary between two stages: tensors in any nesting, dataclasses included, and plain constants.

A tensor says by its `requires_grad` whether it wants a gradient from the next stage.
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

_PLAIN_TYPES = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, type, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
)


class _DataclassNode:
    """A dataclass instance as a node of a pytree, so that users need not register their class with torch."""

    def __init__(self, dataclass_type: type, fields: dict[str, Any]) -> None:
        self.dataclass_type = dataclass_type
        self.fields = fields


def _flatten_node(node: _DataclassNode) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(node.fields.values()), (node.dataclass_type, tuple(node.fields))


def _rebuild_dataclass(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    dataclass_type, names = context
    # the fields as they were: neither __init__ nor __post_init__ of the user's class runs a second time
    instance: Any = object.__new__(dataclass_type)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


pytree.register_pytree_node(_DataclassNode, _flatten_node, _rebuild_dataclass)


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _dataclass_to_node(value: Any) -> Any:
    if not _is_dataclass_instance(value):
        return value
    # declared fields, and attributes that somebody set on the instance beside them
    names = [*(field.name for field in dataclasses.fields(value)), *getattr(value, "__dict__", ())]
    fields = {}
    for name in names:
        if hasattr(value, name):
            fields[name] = pytree.tree_map(_dataclass_to_node, getattr(value, name))
    return _DataclassNode(type(value), fields)


def flatten(value: Any) -> tuple[list[Any], Any]:
    """As torch's `tree_flatten`, with dataclasses as nodes; its `tree_unflatten` gives them back."""
    leaves, nesting = pytree.tree_flatten(value)
    if any(_is_dataclass_instance(leaf) for leaf in leaves):
        return pytree.tree_flatten(pytree.tree_map(_dataclass_to_node, value))
    return leaves, nesting


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of every leaf, in the nesting of `value`."""
    # the common case, without pytree
    if isinstance(value, Tensor):
        return function(value)
    leaves, nesting = flatten(value)
    return pytree.tree_unflatten([function(leaf) for leaf in leaves], nesting)


class _TensorSearch(pickle.Pickler):
    """Pickles an object into nothing, and notes whether a tensor is inside."""

    has_tensor = False

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        self.has_tensor = True
        return "tensor"


def check_leaf(stage: int, leaf: Any) -> None:
    """Raise ValueError for what cannot be handed to the next stage, with the remedy."""
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided or leaf.is_nested:
            if leaf.is_nested:
                kind = "nested"
            else:
                kind = str(leaf.layout).removeprefix("torch.")
            raise ValueError(
                f"stage {stage} returns a {kind} tensor, and only dense tensors go from stage to stage; return its "
                "parts (values, offsets, ...) or a padded one, and make it again in the next stage"
            )
        return
    if isinstance(leaf, _PLAIN_TYPES):
        return
    # any other object is sent as a constant, if it can be pickled and hides no tensor
    search = _TensorSearch(io.BytesIO())
    try:
        search.dump(leaf)
        if search.has_tensor:
            problem = "that holds a tensor, whose gradient would be nobody's"
        else:
            problem = ""
    except Exception as error:
        problem = f"that is neither a tensor nor a plain constant ({error})"
    if problem:
        raise ValueError(
            f"stage {stage} returns a {type(leaf).__module__}.{type(leaf).__qualname__} {problem}; return tensors "
            "and constants in tuples, lists, mappings or dataclasses"
        )


class _WritableView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output


class _GraphlessView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, owner: str) -> Tensor:
        ctx.owner = owner
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.owner} was used outside of its stage, which is recomputed as a whole: it would get no gradient; "
            "return it from the stage, or use another recompute policy"
        )


def graphless_view(value: Tensor, owner: str) -> Tensor:
    """`value`, which a forward without a graph left on a module: it can be read; its backward raises RuntimeError."""
    with torch.enable_grad():
        # a Function without an input that requires grad would record no backward: the anchor is one
        anchor = torch.zeros((), requires_grad=True)
        view: Tensor = _GraphlessView.apply(anchor, value, owner)
    return view


def writable_view(value: Any) -> Any:
    """A received tensor as the module may take it: like any activation, it may be written in place.

    Autograd refuses that for a leaf that requires grad; this view has the same memory and the leaf as its input.
    Costs 3 us.
    """
    if isinstance(value, Tensor) and value.requires_grad:
        return _WritableView.apply(value)
    return value


def clone_tensor(value: Any) -> Any:
    """A copy of a tensor; anything else as it is."""
    if isinstance(value, Tensor):
        return value.clone()
    return value
