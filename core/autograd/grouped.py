"""One product per group of rows: the experts of a layer, each with a matrix of its own and the rows routed to it.

    forward   y[e] = x[e] W[e]^T        for the rows of group e
    I         dx[e] = dy[e] W[e]
    W         dW[e] = dy[e]^T x[e]

Shapes: x [n, i], sorted by group; W [e, o..., i]; y [n, o]. `counts`: the rows of each group, on the host.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from core.autograd.bag import StageContext
from core.autograd.gradients import (
    accumulate,
    delivers,
    main_grad_of,
    no_second_derivative,
    overwritten,
)
from core.autograd.products import add_product
from core.autograd.recomputation.two_runs import recomputed_region


def multiply_groups(x: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    """x [n, i], matrices [e, i, o] -> [n, o]: each group's rows times its matrix."""
    if x.device.type not in ("cpu", "meta") and _has_grouped_product(x.device.type, x.dtype):
        ends = torch.tensor(counts, device=x.device).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, matrices, offs=ends)
    # one tensor that every group's product is written into: nothing is concatenated
    products = x.new_empty(x.shape[0], matrices.shape[2])
    rows_of = torch.split_with_sizes(x, counts)
    targets = torch.split_with_sizes(products, counts)
    for rows, matrix, target in zip(rows_of, matrices.unbind(), targets, strict=True):
        if rows.shape[0]:
            torch.mm(rows, matrix, out=target)
    return products


@cache
def _has_grouped_product(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the device's grouped product gives the loop's numbers, an empty group included; tried once."""
    generator = torch.Generator().manual_seed(0)
    # experts without rows are common, so the trial has one
    counts = [16, 0, 32]
    x = torch.randn(48, 32, generator=generator).to(device_type, dtype)
    matrices = torch.randn(3, 64, 32, generator=generator).to(device_type, dtype).transpose(1, 2)
    expected = torch.cat(
        [rows @ matrix for rows, matrix in zip(x.split(counts), matrices, strict=True)]
    )
    try:
        ends = torch.tensor(counts, device=device_type).cumsum(0, dtype=torch.int32)
        products = F.grouped_mm(x, matrices, offs=ends)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return False
    return bool(torch.allclose(products.float(), expected.float(), rtol=1e-2, atol=1e-1))


def _add_products(target: Tensor, x: Tensor, gy: Tensor, counts: list[int]) -> None:
    matrices = target.view(target.shape[0], -1, target.shape[-1])
    rows_of = torch.split_with_sizes(x, counts)
    gradients_of = torch.split_with_sizes(gy, counts)
    for matrix, rows, gradients in zip(matrices.unbind(), rows_of, gradients_of, strict=True):
        if not rows.shape[0]:
            continue
        if matrix.dtype == rows.dtype:
            # the product adds itself: no gradient of its own in between
            matrix.addmm_(gradients.t(), rows)
        else:
            add_product(matrix, rows, gradients)


class GroupedThunk:
    """dW of one use. One without rows waits in the bag as well: readiness is counted alike on all ranks."""

    __slots__ = ("_counts", "_gy", "_x", "parameter")

    def __init__(self, parameter: Parameter, x: Tensor, gy: Tensor, counts: list[int]) -> None:
        self.parameter = parameter
        self._x = x
        self._gy = gy
        self._counts = counts

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The input and the output gradient."""
        return self._x, self._gy

    def run(self) -> None:
        """Add the products into `main_grad`, or into `.grad`."""
        target = main_grad_of(self.parameter)
        if target is None:
            accumulate(self.parameter, _products(self.parameter, self._x, self._gy, self._counts))
        else:
            _add_products(target, self._x, self._gy, self._counts)


def _products(weight: Tensor, x: Tensor, gy: Tensor, counts: list[int]) -> Tensor:
    gradient = torch.zeros(weight.shape, dtype=x.dtype, device=x.device)
    _add_products(gradient, x, gy, counts)
    return gradient


class _GroupedLinear(torch.autograd.Function):
    """The Parameter is kept on ctx, never in save_for_backward: a checkpoint's pack hook would detach it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: list[int], stage: StageContext
    ) -> Tensor:
        # gated experts keep gate and up as a dim of their own
        matrices = weight.flatten(1, -2)
        device_type = x.device.type
        if not x.is_meta and torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
            autocast_dtype = torch.get_autocast_dtype(device_type)
            x = x.to(autocast_dtype)
            matrices = matrices.to(autocast_dtype)
        # of a frozen weight the input is not needed
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.counts = counts
        ctx.bag = stage.bag
        ctx.region = recomputed_region.get()
        # backward reads the weight for dx; a step in between would change it unseen
        ctx.version = weight._version if ctx.needs_input_grad[0] else 0
        return multiply_groups(x, matrices.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("a grouped linear")
        weight = ctx.weight
        counts = ctx.counts
        bag = ctx.bag
        dx = None
        dw = None
        if ctx.needs_input_grad[0]:
            if weight._version != ctx.version:
                raise overwritten(weight, ctx.version)
            dx = multiply_groups(gy, weight.flatten(1, -2).to(gy.dtype), counts)
        if ctx.needs_input_grad[1]:
            (x,) = ctx.saved_tensors
            # as a plain linear's: into the bag, into `main_grad`, or autograd delivers it
            past_autograd = delivers(ctx, weight, ctx.region)
            if past_autograd and bag is not None and bag.open:
                bag.put(GroupedThunk(weight, x.detach(), gy, counts))
            elif past_autograd and (main_grad := main_grad_of(weight)) is not None:
                _add_products(main_grad, x, gy, counts)
            else:
                dw = _products(weight, x, gy, counts)
        return dx, dw, None, None


def grouped_linear(x: Tensor, weight: Tensor, counts: list[int], *, stage: StageContext) -> Tensor:
    """x [n, i], sorted by group, with weight [e, o..., i] -> [n, o]; `counts`: rows of each of the e groups.

    Not for compiled graphs: counts are read on the host. The weight's gradient goes into the bag of `stage`, into
    `main_grad` or to autograd, as `deferred_linear`'s.
    """
    y: Tensor = _GroupedLinear.apply(x, weight, counts, stage)
    return y
