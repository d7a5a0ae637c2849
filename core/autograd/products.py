"""The product of a weight gradient, the thunk that computes it later, and the collectives around a matmul."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from core.autograd.fp8 import Fp8
from core.autograd.gradients import accumulate, main_grad_of


class PendingProducts(Protocol):
    """A tensor that a collective is still producing."""

    def wait(self) -> Tensor:
        """The tensor, once it is there."""
        ...


@dataclass(frozen=True, eq=False)
class Comm:
    """The collectives around one matmul; None where there is none. Built by tensor parallelism.

    before_forward: x as held -> x as multiplied (sequence parallel: all-gather); called again for dW.
    after_forward: y as multiplied -> y as returned (row parallel: all-reduce or reduce-scatter). What it
        returns must be its own: the bias is added in place, after it.
    before_backward: dy as received -> dy as multiplied (the conjugate of after_forward), for dx and db;
        called again for a deferred dW.
    after_backward: starts dx as multiplied -> dx as returned (the conjugate of before_forward), beside dW.
    restart_before_forward: starts before_forward for a dW computed at once, beside dx.
    """

    before_forward: Callable[[Tensor], Tensor] | None = None
    after_forward: Callable[[Tensor], Tensor] | None = None
    before_backward: Callable[[Tensor], Tensor] | None = None
    after_backward: Callable[[Tensor], PendingProducts] | None = None
    restart_before_forward: Callable[[Tensor], PendingProducts] | None = None


NO_COMM = Comm()


@cache
def _multiplies_into_float32(device_type: str) -> bool:
    """Whether this device has the mixed product (16-bit factors, float32 sum); tried once."""
    try:
        ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device_type)
        # from ones: a backend that drops what is there would pass with zeros
        out = torch.ones(16, 16, dtype=torch.float32, device=device_type)
        torch.addmm(out, ones, ones, out_dtype=torch.float32, out=out)
        return bool((out == 17).all())
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def matrix_of(weight: Tensor) -> Tensor:
    """[o..., i] -> [o, i]."""
    if weight.dim() == 2:
        return weight
    return weight.view(-1, weight.shape[-1])


def weight_gradient(
    parameter: Parameter, x: Tensor, gy: Tensor, fp8: Fp8 | None = None
) -> Tensor | None:
    """dy^T x, added straight into `main_grad` where there is one (then None is returned, else the gradient).

    The sum is in main_grad's dtype without an intermediate where dtypes are equal, or where the device
    multiplies 16-bit factors into float32; otherwise the product is rounded once and added.
    """
    main_grad = main_grad_of(parameter)
    if main_grad is None:
        return product(parameter, x, gy, fp8)
    add_product(main_grad, x, gy, fp8)
    return None


def product(weight: Tensor, x: Tensor, gy: Tensor, fp8: Fp8 | None = None) -> Tensor:
    """dy^T x, as a tensor of its own."""
    x = x.reshape(-1, x.shape[-1])
    gy = gy.reshape(-1, gy.shape[-1])
    if fp8 is not None and fp8.wgrad:
        return fp8.weight_gradient(x, gy, x.dtype).view(weight.shape)
    return gy.t().mm(x).view(weight.shape)


def add_product(main_grad: Tensor, x: Tensor, gy: Tensor, fp8: Fp8 | None = None) -> None:
    """main_grad [o..., i] += gy^T x, of gy [..., o] and x [..., i]; in main_grad's dtype where the device can.

    With `fp8` of 8-bit factors: the product is made in main_grad's dtype, and added.
    """
    x = x.reshape(-1, x.shape[-1])
    gy = gy.reshape(-1, gy.shape[-1])
    target = matrix_of(main_grad)
    if fp8 is not None and fp8.wgrad:
        target.add_(fp8.weight_gradient(x, gy, target.dtype))
    elif main_grad.dtype == x.dtype:
        target.addmm_(gy.t(), x)
    elif main_grad.dtype == torch.float32 and _multiplies_into_float32(x.device.type):
        torch.addmm(target, gy.t(), x, out_dtype=torch.float32, out=target)
    else:
        target.add_(gy.t().mm(x))


class LinearThunk:
    """dW of one use: keeps x and dy sharded over the ranks, and gathers them again when it runs."""

    __slots__ = ("_comm", "_fp8", "_gy", "_x", "parameter")

    def __init__(
        self, parameter: Parameter, x: Tensor, gy: Tensor, comm: Comm, fp8: Fp8 | None = None
    ) -> None:
        self.parameter = parameter
        self._x = x
        self._gy = gy
        self._comm = comm
        self._fp8 = fp8

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The input and the output gradient."""
        return self._x, self._gy

    def run(self) -> None:
        """Add the product into `main_grad`, or into `.grad`."""
        x = self._x
        gy = self._gy
        comm = self._comm
        if comm.before_forward is not None:
            x = comm.before_forward(x)
        if comm.before_backward is not None:
            gy = comm.before_backward(gy)
        parameter = self.parameter
        target = main_grad_of(parameter)
        if target is None:
            # no main_grad: straight into .grad, where it can take the product as it is
            target = parameter.grad
            if target is None or target.dtype != x.dtype or target.layout is not torch.strided:
                accumulate(parameter, product(parameter, x, gy, self._fp8))
                return
        add_product(target, x, gy, self._fp8)
