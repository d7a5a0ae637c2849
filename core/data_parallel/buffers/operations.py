"""Torch's operations on a gradient that lies in a bucket, by what they need of it.

Each rank may hold a shard only. An operation of none of these sets is given the full gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# in place, the same for every element: each rank changes its shard, and no message is needed
ELEMENTWISE = {
    aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.clamp_.default,
    aten.clamp_max_.default, aten.clamp_min_.default, aten.neg_.default, aten.nan_to_num_.default,
    aten.zero_.default, aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar, aten._foreach_div_.Scalar,
    aten._foreach_div_.Tensor, aten._foreach_clamp_max_.Scalar, aten._foreach_clamp_min_.Scalar,
    aten._foreach_zero_.default, aten._foreach_neg_.default,
}  # fmt: skip
# what `clip_grad_norm_` does with its factor
SCALES = {aten.mul_.Tensor, aten._foreach_mul_.Tensor}
# `GradScaler.unscale_`: divides each shard, and tells in one number whether any element is not finite
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
# each rank's sum of powers, then an all-reduce
NORMS = {aten._foreach_norm.Scalar, aten.linalg_vector_norm.default}
ZEROES = {aten.zero_.default, aten._foreach_zero_.default}
# autograd's accumulation, in place or not
ADDS = {aten.add_.Tensor, aten.add.Tensor}


def one_norm_per_tensor(func: Any, args: Any, kwargs: Any, gradient_class: type) -> bool:
    """Whether a norm is one number per tensor, in the tensor's own dtype."""
    if func is aten._foreach_norm.Scalar:
        return not kwargs and all(type(tensor) is gradient_class for tensor in args[0])
    # more arguments are dims, or another dtype of the result
    return len(args) <= 2 and not any(value is not None for value in kwargs.values())


def only_scalars_beside(leaves: Sequence[Any], gradient_class: type) -> bool:
    """Whether the other operands are numbers, which change every element alike, on every shard."""
    return all(
        type(leaf) is gradient_class or not isinstance(leaf, Tensor) or not leaf.dim()
        for leaf in leaves
    )
