"""Rows that a program selects among a context rank's, and torch's losses of them: what is followed further."""

from typing import Any

import torch
from torch import Tensor

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_functions import Finding, Followed
from core.parallel_state.by_hand.split_tensor import SplitTensor

_BY_CLASS = ("cross_entropy", "nll_loss")  # of [n, classes, ...]
# what is followed of rows that a program took by their numbers, and may write into
BY_NUMBER = "by number"
_WRITES_OF_A_DIM = ("index_copy", "index_fill")
# rows are written by their numbers, or by where a mask is set
WRITES = ("setitem", "slice_scatter", "masked_scatter", *_WRITES_OF_A_DIM)
_BY_ELEMENT = [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "binary_cross_entropy",
]
_BY_ELEMENT += ["binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss"]
_BY_ELEMENT += ["hinge_embedding_loss"]
# of [..., n], a number for each row
_BY_ROW = (
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "cosine_embedding_loss",
)


def selected(name: str, args: tuple, result: Any) -> Finding | Followed | None:
    """Rows that are taken by a mask or by their numbers in this rank's rows: as many as each rank has."""
    x = args[0] if args else None
    name = name.rstrip("_")
    if not isinstance(x, SplitTensor):
        return None
    if name in _WRITES_OF_A_DIM:
        by_number = isinstance(args[1], int) and split_axes.is_split(x.axes, [args[1]])
        return Finding("cut", name, tuple(x.shape)) if by_number else None
    if name not in ("getitem", "masked_select", "index_select"):
        return None
    if name == "masked_select":
        if split_axes.is_split(x.axes):
            return [(result, _own_rows(result))]
        return None
    index = args[1]
    if name == "index_select":
        if index == 0 and split_axes.is_split(x.axes, [0]):
            return [(result, (*_own_rows(result), *x.axes[1:]))]
        return None
    if (
        isinstance(index, tuple)
        and index
        and all(isinstance(i, Tensor) and i.dim() == 1 for i in index)
    ):
        if not split_axes.is_split(x.axes, range(len(index))):
            return None
        of_each = torch.arange(len(x), device=index[0].device)
        # `hidden[arange(b), last]`
        if len(index) > 1 and torch.equal(index[0], of_each):
            return Finding("cut", name, tuple(x.shape))
        return [(result, (*_own_rows(result), *x.axes[len(index) :]))]
    if isinstance(index, tuple):  # `hidden[:, last]`
        numbered = [dim for dim, i in enumerate(index) if isinstance(i, Tensor)]
        by_number = split_axes.is_split(x.axes, numbered) and not any(
            i is None or i is Ellipsis for i in index
        )
        if by_number:
            return Finding("cut", name, tuple(x.shape))
        return None
    if not isinstance(index, Tensor):
        return None
    # one row by its number, which is a tensor
    if index.dim() == 0 and index.dtype is not torch.bool and split_axes.is_split(x.axes, [0]):
        return Finding("cut", name, tuple(x.shape))
    dims = index.dim() if index.dtype is torch.bool else 1
    if not split_axes.is_split(x.axes, range(dims)):
        return None
    if index.dtype is not torch.bool and index.dim() != 1:
        return None
    return [(result, (*_own_rows(result), *x.axes[dims:]))]


def _own_rows(result: Tensor) -> Axes:
    """Of dim 0: rows that a rank selected among its own."""
    return (((result.shape[0], True),),)


def loss_outcome(
    name: str, args: tuple, kwargs: dict[str, Any], result: Any
) -> Finding | Followed | float | None:
    """A loss of torch's: by what it divided, or its elements' axes."""
    if name in _BY_ROW or name == "pairwise_distance":
        return _loss_of_rows(name, args, kwargs, result)
    if name not in _BY_CLASS and name not in _BY_ELEMENT:
        return None
    x, target = (
        args[place] if len(args) > place else kwargs[key]
        for place, key in enumerate(("input", "target"))
    )
    if not isinstance(x, SplitTensor):
        return None
    reduction = kwargs.get("reduction", "mean")
    class_dim = min(1, x.dim() - 1)
    # classes that are rows, as of spans: a softmax over this rank's
    if name in _BY_CLASS and split_axes.is_split(x.axes, [class_dim]):
        return Finding("reduction", name, tuple(x.shape))
    if reduction == "none":
        return [(result, split_axes.without(x.axes, [class_dim]) if name in _BY_CLASS else x.axes)]
    if reduction == "sum":
        return 1.0
    if reduction == "batchmean":
        return float(x.shape[0])
    if name in _BY_ELEMENT:
        return float(x.numel())
    if target.is_floating_point():
        return x.numel() / x.shape[class_dim]
    counted_labels = target[target != kwargs.get("ignore_index", -100)]
    weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
    if weight is not None:
        return float(weight[counted_labels].sum())
    return float(counted_labels.numel())


def _loss_of_rows(
    name: str, args: tuple, kwargs: dict[str, Any], result: Tensor
) -> Followed | float | None:
    x = args[0]
    if not isinstance(x, SplitTensor) or split_axes.is_split(x.axes, [x.dim() - 1]):
        return None
    if result.dim() == x.dim() - 1:
        return [(result, x.axes[:-1])]
    if name == "pairwise_distance":  # with keepdim
        return [(result, (*x.axes[:-1], ()))]
    return 1.0 if kwargs.get("reduction") == "sum" else x.numel() / x.shape[-1]
