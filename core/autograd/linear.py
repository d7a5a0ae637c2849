"""y = x W^T + b whose weight gradient can wait: computed at once, or put into the microbatch's bag.

    forward   y  = x W^T + b
    I         dx = dy W           db = sum over tokens of dy
    W         dW = dy^T x

Shapes: x [..., i], W [o..., i] (a weight may keep several output dims; they are flattened), y [..., o].
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from core.autograd import compiled
from core.autograd.bag import StageContext, check_unwritten, delivers
from core.autograd.later import calls
from core.autograd.products import NO_COMM, Comm, LinearThunk, matrix_of, product, weight_gradient
from core.autograd.recompute import running_again


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
        matrix = matrix_of(weight)
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
            collective = comm.before_forward is not None or comm.after_forward is not None
            operands = [t for t in (x, matrix, vector) if t is not None]
            y = region.multiply(partial(_multiply, x.detach(), matrix, vector, comm), operands, collective)
        if y._is_view():  # autograd lets nobody write into a view that a Function returns, and `relu_` is common
            y = y.detach()
        if ctx.needs_input_grad[1]:  # under a frozen weight nothing of the input is kept
            ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.comm, ctx.bag = weight, bias, comm, stage.bag
        ctx.region, ctx.version = running_again.get(), weight._version if ctx.needs_input_grad[0] else 0
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
            directly = delivers(ctx, weight, ctx.region)
            waits = directly and bag is not None and bag.open
            if not waits and comm.start_again is not None:
                again = comm.start_again(x)
        if wants_dx:
            check_unwritten(weight, ctx.version)
            matrix = matrix_of(weight)
            dx = gy.matmul(matrix if matrix.dtype == gy.dtype else matrix.to(gy.dtype))
            if comm.after_backward is not None:
                pending = comm.after_backward(dx)
        if wants_dw:
            if waits:
                bag.put(LinearThunk(weight, x.detach(), sharded, comm))  # x itself would keep the graph's inputs
            else:
                if again is not None:
                    x = again.wait()
                elif comm.before_forward is not None:
                    x = comm.before_forward(x)
                dw = weight_gradient(weight, x, gy) if directly else product(weight, x, gy)
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
    if torch.compiler.is_compiling():
        alone = comm.before_forward is None and comm.after_forward is None and comm.before_backward is None
        made = compiled.linear(x, weight, bias, stage) if alone and comm.after_backward is None else None
        return made if made is not None else _eagerly(x, weight, bias, stage, comm)
    y: Tensor = _Linear.apply(x, weight, bias, stage, comm)
    return y


@torch.compiler.disable
def _eagerly(x: Tensor, weight: Parameter, bias: Parameter | None, stage: StageContext, comm: Comm) -> Tensor:
    """A break in the compiled graph."""
    y: Tensor = _Linear.apply(x, weight, bias, stage, comm)
    return y
