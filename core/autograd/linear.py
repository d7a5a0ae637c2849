"""y = x W^T + b whose weight gradient can wait: computed at once, or put into the microbatch's bag.

    forward   y  = x W^T + b
    I         dx = dy W           db = sum over tokens of dy
    W         dW = dy^T x

Shapes: x [..., i], W [o..., i] (a weight may keep several output dims; they are flattened), y [..., o].
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from core.autograd.bag import StageContext, accumulate, delivers
from core.autograd.later import calls
from core.autograd.recompute import running_again


class Pending(Protocol):
    """A tensor under way."""

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
    start_again: starts before_forward for a dW computed at once, beside dx.
    """

    before_forward: Callable[[Tensor], Tensor] | None = None
    after_forward: Callable[[Tensor], Tensor] | None = None
    before_backward: Callable[[Tensor], Tensor] | None = None
    after_backward: Callable[[Tensor], Pending] | None = None
    start_again: Callable[[Tensor], Pending] | None = None


NO_COMM = Comm()


@cache
def _multiplies_into_float32(device_type: str) -> bool:
    """Whether this device has the mixed product (16-bit factors, float32 sum); tried once."""
    try:
        a = torch.ones(16, 16, dtype=torch.bfloat16, device=device_type)
        out = torch.zeros(16, 16, dtype=torch.float32, device=device_type)
        torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
        return bool(out[0, 0] == 16)
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def _matrix(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 2 else weight.view(-1, weight.shape[-1])


def weight_gradient(parameter: Parameter, x: Tensor, gy: Tensor) -> Tensor | None:
    """dy^T x, added straight into `main_grad` where there is one (then None is returned, else the gradient).

    The sum is in main_grad's dtype without an intermediate where dtypes are equal, or where the device
    multiplies 16-bit factors into float32; otherwise the product is rounded once and added.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None:
        return _product(parameter, x, gy)
    _add_product(main_grad, x, gy)
    return None


def _product(weight: Tensor, x: Tensor, gy: Tensor) -> Tensor:
    return gy.reshape(-1, gy.shape[-1]).t().mm(x.reshape(-1, x.shape[-1])).view(weight.shape)


def _add_product(main_grad: Tensor, x: Tensor, gy: Tensor) -> None:
    x, gy = x.reshape(-1, x.shape[-1]), gy.reshape(-1, gy.shape[-1])
    into = _matrix(main_grad)
    if main_grad.dtype == x.dtype:
        into.addmm_(gy.t(), x)
    elif main_grad.dtype == torch.float32 and _multiplies_into_float32(x.device.type):
        torch.addmm(into, gy.t(), x, out_dtype=torch.float32, out=into)
    else:
        into.add_(gy.t().mm(x))


class _LinearThunk:
    """dW of one use: holds x and dy as they are between the ranks (sharded), and gathers them again."""

    __slots__ = ("_comm", "_gy", "_x", "parameter")

    def __init__(self, parameter: Parameter, x: Tensor, gy: Tensor, comm: Comm) -> None:
        self.parameter, self._x, self._gy, self._comm = parameter, x, gy, comm

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self._x, self._gy

    def run(self) -> None:
        x, gy, comm = self._x, self._gy, self._comm
        if comm.before_forward is not None:
            x = comm.before_forward(x)
        if comm.before_backward is not None:
            gy = comm.before_backward(gy)
        parameter = self.parameter
        into = getattr(parameter, "main_grad", None)
        if into is None:
            into = parameter.grad
            if into is None or into.dtype != x.dtype or into.layout is not torch.strided:
                accumulate(parameter, _product(parameter, x, gy))
                return
        _add_product(into, x, gy)


def _multiply(x: Tensor, matrix: Tensor, vector: Tensor | None, comm: Comm) -> Tensor:
    if comm.before_forward is not None:
        x = comm.before_forward(x)
    if comm.after_forward is None:
        return F.linear(x, matrix, vector)
    y = comm.after_forward(F.linear(x, matrix))
    return y if vector is None else y.add_(vector)


class _Linear(torch.autograd.Function):
    """The Parameter is kept on ctx, never in save_for_backward: a checkpoint's pack hook would detach it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, bias: Parameter | None, stage: StageContext, comm: Comm
    ) -> Tensor:
        matrix = _matrix(weight)
        vector = bias if bias is None or bias.dim() == 1 else bias.view(-1)
        kind = x.device.type
        # autocast knows no meta device, and leaves float64 alone
        if not x.is_meta and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            cast = torch.get_autocast_dtype(kind)
            x, matrix, vector = x.to(cast), matrix.to(cast), None if vector is None else vector.to(cast)
        region = calls.get()
        if region is None:
            y = _multiply(x, matrix, vector, comm)
        else:
            y = region.multiply(partial(_multiply, x.detach(), matrix, vector, comm))
        if y._is_view():  # autograd lets nobody write into a view that a Function returns, and `relu_` is common
            y = y.detach()
        if ctx.needs_input_grad[1]:  # under a frozen weight nothing of the input is kept
            ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.comm, ctx.bag = weight, bias, comm, stage.bag
        ctx.in_region = running_again.get()
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        weight, comm, bag = ctx.weight, ctx.comm, ctx.bag
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        sharded, again = gy, None
        if comm.before_backward is not None:
            gy = comm.before_backward(gy)
        pending = dx = dw = db = None
        if wants_dw:
            (x,) = ctx.saved_tensors
            directly = delivers(ctx, weight, ctx.in_region)
            waits = directly and bag is not None
            if not waits and comm.start_again is not None:
                again = comm.start_again(x)
        if wants_dx:
            matrix = _matrix(weight)
            dx = gy.matmul(matrix if matrix.dtype == gy.dtype else matrix.to(gy.dtype))
            if comm.after_backward is not None:
                pending = comm.after_backward(dx)
        if wants_dw:
            if waits:
                bag.put(_LinearThunk(weight, x.detach(), sharded, comm))  # x itself would keep the graph's inputs
            else:
                if again is not None:
                    x = again.wait()
                elif comm.before_forward is not None:
                    x = comm.before_forward(x)
                dw = weight_gradient(weight, x, gy) if directly else _product(weight, x, gy)
        if wants_db:
            bias = ctx.bias
            db = gy.reshape(-1, gy.shape[-1]).sum(0)
            if bias.dim() != 1:
                db = db.view(bias.shape)
        return dx if pending is None else pending.wait(), dw, db, None, None


def deferred_linear(
    x: Tensor,
    weight: Parameter,
    bias: Parameter | None = None,
    *,
    stage: StageContext,
    comm: Comm = NO_COMM,
) -> Tensor:
    """x [..., i] -> [..., o] with weight [o..., i] and bias [o...], and the collectives of `comm` around it.

    With a bag in `stage` at the time of the forward, backward defers dW into it (autograd gets None);
    without one dW goes into `weight.main_grad`, or to autograd where there is no main_grad.
    """
    y: Tensor = _Linear.apply(x, weight, bias, stage, comm)
    return y
