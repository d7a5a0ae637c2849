"""One product per group of rows: the experts of a layer, each with a matrix of its own and the rows routed to it.

    forward   y[e] = x[e] W[e]^T        for the rows of group e
    I         dx[e] = dy[e] W[e]
    W         dW[e] = dy[e]^T x[e]

Shapes: x [n, i], sorted by group; W [e, o..., i]; y [n, o]. `counts`: the rows of each group, on the host.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from core.autograd.bag import StageContext
from core.autograd.fp8 import Fp8
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


def _multiply_each(
    product: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    matrices: Tensor,
    counts: list[int],
    width: int,
) -> Tensor:
    """x [n, ...], matrices [e, ...] -> [n, width]: `product` of each group's rows and its matrix, one by one."""
    products = x.new_empty(x.shape[0], width)
    rows_of = torch.split_with_sizes(x, counts)
    targets = torch.split_with_sizes(products, counts)
    for rows, matrix, target in zip(rows_of, matrices.unbind(), targets, strict=True):
        if rows.shape[0]:
            target.copy_(product(rows, matrix))
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


def _add_products(
    target: Tensor, x: Tensor, gy: Tensor, counts: list[int], fp8: Fp8 | None
) -> None:
    matrices = target.view(target.shape[0], -1, target.shape[-1])
    rows_of = torch.split_with_sizes(x, counts)
    gradients_of = torch.split_with_sizes(gy, counts)
    for matrix, rows, gradients in zip(matrices.unbind(), rows_of, gradients_of, strict=True):
        if not rows.shape[0]:
            continue
        if fp8 is None and matrix.dtype == rows.dtype:
            # the product adds itself: no gradient of its own in between
            matrix.addmm_(gradients.t(), rows)
        else:
            add_product(matrix, rows, gradients, fp8)


class GroupedThunk:
    """dW of one use. One without rows waits in the bag as well: readiness is counted alike on all ranks."""

    __slots__ = ("_counts", "_fp8", "_gy", "_x", "parameter")

    def __init__(
        self, parameter: Parameter, x: Tensor, gy: Tensor, counts: list[int], fp8: Fp8 | None
    ) -> None:
        self.parameter = parameter
        self._x = x
        self._gy = gy
        self._counts = counts
        self._fp8 = fp8

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The input and the output gradient."""
        return self._x, self._gy

    def run(self) -> None:
        """Add the products into `main_grad`, or into `.grad`."""
        parameter = self.parameter
        target = main_grad_of(parameter)
        if target is None:
            products = _products(parameter, self._x, self._gy, self._counts, self._fp8)
            accumulate(parameter, products)
        else:
            _add_products(target, self._x, self._gy, self._counts, self._fp8)


def _products(weight: Tensor, x: Tensor, gy: Tensor, counts: list[int], fp8: Fp8 | None) -> Tensor:
    gradient = torch.zeros(weight.shape, dtype=x.dtype, device=x.device)
    _add_products(gradient, x, gy, counts, fp8)
    return gradient


class _GroupedLinear(torch.autograd.Function):
    """The Parameter is kept on ctx, never in save_for_backward: a checkpoint's pack hook would detach it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: list[int],
        stage: StageContext,
        fp8: Fp8 | None,
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
        ctx.fp8 = fp8
        ctx.bag = stage.bag
        ctx.region = recomputed_region.get()
        # backward reads the weight for dx; a step in between would change it unseen
        ctx.version = weight._version if ctx.needs_input_grad[0] else 0
        if fp8 is None:
            return multiply_groups(x, matrices.transpose(1, 2), counts)
        return _multiply_each(fp8.forward, x, matrices, counts, matrices.shape[1])

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("a grouped linear")
        weight = ctx.weight
        counts = ctx.counts
        bag = ctx.bag
        fp8 = ctx.fp8
        dx = None
        dw = None
        if ctx.needs_input_grad[0]:
            if weight._version != ctx.version:
                raise overwritten(weight, ctx.version)
            matrices = weight.flatten(1, -2).to(gy.dtype)
            if fp8 is None:
                dx = multiply_groups(gy, matrices, counts)
            else:
                width = matrices.shape[2]
                dx = _multiply_each(fp8.input_gradient, gy, matrices, counts, width)
        if ctx.needs_input_grad[1]:
            (x,) = ctx.saved_tensors
            # as a plain linear's: into the bag, into `main_grad`, or autograd delivers it
            past_autograd = delivers(ctx, weight, ctx.region)
            if past_autograd and bag is not None and bag.open:
                bag.put(GroupedThunk(weight, x.detach(), gy, counts, fp8))
            elif past_autograd and (main_grad := main_grad_of(weight)) is not None:
                _add_products(main_grad, x, gy, counts, fp8)
            else:
                dw = _products(weight, x, gy, counts, fp8)
        return dx, dw, None, None, None


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: list[int],
    *,
    stage: StageContext,
    fp8: Fp8 | None = None,
) -> Tensor:
    """x [n, i], sorted by group, with weight [e, o..., i] -> [n, o]; `counts`: rows of each of the e groups.

    Not for compiled graphs: counts are read on the host. The weight's gradient goes into the bag of `stage`, into
    `main_grad` or to autograd, as `deferred_linear`'s. fp8: of 8-bit factors, one group after the other, each group's
    rows and matrix with scales of their own.
    """
    y: Tensor = _GroupedLinear.apply(x, weight, counts, stage, fp8)
    return y
