"""Plain tensors that a program writes at places which rows of its batch name: a mask of the tokens of a sequence."""

from typing import Any

import torch
from torch import Tensor

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_tensor import SplitTensor

_OF_A_DIM = ("index_fill", "index_add", "index_copy", "index_reduce")


def joins_rows(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether what is written, or found, is of several rows at once: `zeros(b, V).scatter_(1, labels, 1)`.

    Not where each row has a place of its own: `zeros(b, s, V).scatter_(2, labels[..., None], 1)`.
    """
    name = name.rstrip("_")
    if name == "isin":
        return _has_rows(_argument(args, kwargs, 1, "test_elements"))
    if isinstance(args[0], SplitTensor):
        return False
    if name == "scatter":
        index = _argument(args, kwargs, 2, "index")
        return _has_rows(index, _argument(args, kwargs, 1, "dim"))
    if name in _OF_A_DIM:
        return _has_rows(_argument(args, kwargs, 2, "index"))
    if name in ("setitem", "index_put"):
        indices = _argument(args, kwargs, 1, "indices")
        return _at_places(indices if isinstance(indices, (tuple, list)) else (indices,))
    return False


def _argument(args: tuple, kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _has_rows(index: Any, dim: int | None = None) -> bool:
    is_followed = isinstance(index, SplitTensor)
    return is_followed and split_axes.is_split(index.axes, None if dim is None else [dim])


def _at_places(indices: Any) -> bool:
    """Whether no other index counts the rows along with one that is made of them, `x[arange(n), labels]`."""
    tensors = [i for i in indices if isinstance(i, Tensor) and i.dtype is not torch.bool]
    for rows in tensors:
        if not _has_rows(rows):
            continue
        # from the right, as they broadcast
        split = [dim - rows.dim() for dim in range(rows.dim()) if _has_rows(rows, dim)]
        others = [i for i in tensors if i is not rows and not _has_rows(i)]
        if not all(any(i.dim() >= -dim and i.shape[dim] > 1 for i in others) for dim in split):
            return True
    return False
