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

from core.autograd.bag import NO_DEFERRAL, StageContext, Ticket, object_of
from core.autograd.fp8 import Fp8
from core.autograd.gradients import delivers, has_main_grad, no_second_derivative, overwritten
from core.autograd.products import NO_COMM, Comm, LinearThunk, matrix_of, product, weight_gradient
from core.autograd.recomputation.lazy_product import linears_of_region
from core.autograd.recomputation.two_runs import recomputed_region


def _multiply(
    x: Tensor, matrix: Tensor, flat_bias: Tensor | None, comm: Comm, fp8: Fp8 | None
) -> Tensor:
    if comm.before_forward is not None:
        x = comm.before_forward(x)
    if fp8 is None and comm.after_forward is None:
        return F.linear(x, matrix, flat_bias)
    y = F.linear(x, matrix) if fp8 is None else fp8.forward(x, matrix)
    if comm.after_forward is not None:
        y = comm.after_forward(y)
    if flat_bias is None:
        return y
    return y.add_(flat_bias)


class _DeferredLinear(torch.autograd.Function):
    """The Parameter is kept on ctx, never in save_for_backward: a checkpoint's pack hook would detach it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        stage: StageContext,
        comm: Comm,
        fp8: Fp8 | None,
    ) -> Tensor:
        matrix = matrix_of(weight)
        flat_bias = bias if bias is None or bias.dim() == 1 else bias.view(-1)
        device_type = x.device.type
        # autocast knows no meta device, and leaves float64 alone
        if not x.is_meta and torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
            autocast_dtype = torch.get_autocast_dtype(device_type)
            x = x.to(autocast_dtype)
            matrix = matrix.to(autocast_dtype)
            if flat_bias is not None:
                flat_bias = flat_bias.to(autocast_dtype)
        region = linears_of_region.get()
        if region is None:
            y = _multiply(x, matrix, flat_bias, comm, fp8)
        else:
            collective = comm.before_forward is not None or comm.after_forward is not None
            operands = [t for t in (x, matrix, flat_bias) if t is not None]
            y = region.multiply(
                partial(_multiply, x.detach(), matrix, flat_bias, comm, fp8), operands, collective
            )
        # autograd lets nobody write into a view that a Function returns, and `relu_` is common
        if y._is_view():
            y = y.detach()
        # of a frozen weight the input is not needed
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.bias = bias
        ctx.comm = comm
        ctx.fp8 = fp8
        ctx.bag = stage.bag
        ctx.region = recomputed_region.get()
        ctx.version = weight._version if ctx.needs_input_grad[0] else 0
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.weight
        comm = ctx.comm
        fp8 = ctx.fp8
        bag = ctx.bag
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        # without collectives the operations below are differentiable themselves
        if torch.is_grad_enabled() and comm is not NO_COMM:
            raise no_second_derivative("a tensor-parallel linear")
        if torch.is_grad_enabled() and fp8 is not None:
            raise no_second_derivative("a linear with fp8")
        sharded_gy = gy
        pending_x = None
        if comm.before_backward is not None:
            gy = comm.before_backward(gy)
        pending_dx = dx = dw = db = None
        if wants_dw:
            (x,) = ctx.saved_tensors
            past_autograd = delivers(ctx, weight, ctx.region)
            # deferred where the parameter's gradient goes past autograd, and its executor runs this very I
            is_deferred = past_autograd and bag is not None and bag.open
            if not is_deferred and comm.restart_before_forward is not None:
                # x was kept as a shard: it is gathered again beside dx
                pending_x = comm.restart_before_forward(x)
        if wants_dx:
            if weight._version != ctx.version:
                raise overwritten(weight, ctx.version)
            matrix = matrix_of(weight)
            matrix = matrix if matrix.dtype == gy.dtype else matrix.to(gy.dtype)
            dx = gy.matmul(matrix) if fp8 is None else fp8.input_gradient(gy, matrix)
            if comm.after_backward is not None:
                pending_dx = comm.after_backward(dx)
        if wants_dw:
            if is_deferred:
                # detached: x itself would keep the graph alive
                bag.put(LinearThunk(weight, x.detach(), sharded_gy, comm, fp8))
            else:
                if pending_x is not None:
                    x = pending_x.wait()
                elif comm.before_forward is not None:
                    x = comm.before_forward(x)
                if past_autograd:
                    dw = weight_gradient(weight, x, gy, fp8)
                else:
                    dw = product(weight, x, gy, fp8)
        if wants_db:
            bias = ctx.bias
            db = gy.reshape(-1, gy.shape[-1]).sum(0)
            if bias.dim() != 1:
                db = db.view(bias.shape)
        return dx if pending_dx is None else pending_dx.wait(), dw, db, None, None, None


# Inside compiled code: one operation for the product, one that puts a thunk into the bag.
#
# A compiled graph holds tensors and numbers only, and is called again with others: the parameter and the bag are
# reached by tickets (core/autograd/bag.py). The deferring operation is registered as having an effect; otherwise the
# compiler would silently drop it (nobody uses what it returns) or merge two equal calls (a weight used twice).


def _has_hooks(parameter: Tensor) -> bool:
    hooks = parameter._post_accumulate_grad_hooks
    of_program = hooks and (len(hooks) > 1 or not has_main_grad(parameter))
    return bool(parameter._backward_hooks or of_program)


def _is_ours_or_plain(parameter: Tensor) -> bool:
    """A dense tensor; a class of ours may carry facts, but not change what operations do."""
    kind = type(parameter)
    return (
        isinstance(parameter, Parameter) and kind.__torch_dispatch__ is Parameter.__torch_dispatch__
    )


@torch.compiler.disable
def make_compilable(parameter: Parameter) -> None:
    """Make this parameter's linear compilable: outside of the graph, at its first call."""
    if parameter.is_leaf and not _has_hooks(parameter) and _is_ours_or_plain(parameter):
        has_owner = has_main_grad(parameter)
        parameter._deferral = Ticket(parameter, has_owner)  # type: ignore[attr-defined]


@torch.library.custom_op("paracore::linear", mutates_args=())
def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, parameter: Tensor, bag: Tensor
) -> Tensor:
    return F.linear(
        x, matrix_of(weight).to(x.dtype), None if bias is None else bias.reshape(-1).to(x.dtype)
    )


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, parameter: Tensor, bag: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], matrix_of(weight).shape[0]))


# a CUDA graph would replay the kernels of a thunk that was put elsewhere
@torch.library.custom_op("paracore::defer", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _defer(x: Tensor, gy: Tensor, weight: Tensor, parameter: Tensor, bag: Tensor) -> None:
    """Put a thunk with clones into the bag: the compiler reuses the memory of tensors that it no longer needs."""
    owner = object_of(parameter)
    target_bag = object_of(bag)
    if owner is None or owner.data_ptr() != weight.data_ptr():
        raise RuntimeError(
            f"a compiled linear lost its parameter of shape {list(weight.shape)}; compile again"
        )
    if _has_hooks(owner):
        raise RuntimeError(
            f"a hook was put on a parameter of shape {list(weight.shape)} after its linear was compiled, and would "
            "see no gradient; register hooks first, then call torch.compiler.reset()"
        )
    if int(bag) and target_bag is None:
        raise RuntimeError(
            "the bag of this microbatch is gone before its backward; keep it until W"
        )
    if target_bag is None or not target_bag.open:
        LinearThunk(owner, x, gy, NO_COMM).run()
    else:
        target_bag.put(LinearThunk(owner, x.clone(), gy.clone(), NO_COMM))


@_defer.register_fake
def _(x: Tensor, gy: Tensor, weight: Tensor, parameter: Tensor, bag: Tensor) -> None:
    return None


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, parameter, bag = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, parameter, bag)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)


def _backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, parameter, bag = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0]:
        dx = gy.matmul(matrix_of(weight).to(gy.dtype))
    if ctx.needs_input_grad[1]:
        torch.ops.paracore.defer(x, gy, weight, parameter, bag)
    db = None
    if ctx.needs_input_grad[2]:
        shape, dtype = ctx.bias
        db = gy.reshape(-1, gy.shape[-1]).sum(0).view(shape).to(dtype)
    return dx, None, db, None, None


_linear.register_autograd(_backward, setup_context=_save_for_backward)


def _has_effect() -> bool:
    """Tell torch that `defer` has one; private in torch 2.13, so that it may be missing."""
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        _register_effectful_op(torch.ops.paracore.defer.default, _EffectType.ORDERED)
    except (ImportError, AttributeError, TypeError):
        return False
    return True


CAN_COMPILE = _has_effect()


def _compiled_linear(
    x: Tensor, weight: Parameter, bias: Tensor | None, stage: StageContext
) -> Tensor | None:
    """The linear as an operation of a compiled graph; None where it cannot be one now.

    Without a bag and without `main_grad` it is a plain `F.linear`.
    """
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device_type))
    bag = stage.bag
    ticket = getattr(weight, "_deferral", None)
    # what the ticket knows is not asked of the tensor: a graph would be bound to the strides of its `main_grad`
    if ticket is not None:
        has_owner = ticket.has_owner
    else:
        has_owner = has_main_grad(weight)
    if bag is None and not has_owner:
        flat_bias = None if bias is None else bias.reshape(-1).to(x.dtype)
        return F.linear(x, matrix_of(weight).to(x.dtype), flat_bias)
    if not CAN_COMPILE:
        return None
    if ticket is None:
        make_compilable(weight)
        return None
    if bag is None:
        bag_number = NO_DEFERRAL
    elif bag.ticket is not None:
        bag_number = bag.ticket.number
    else:  # a copied bag
        return None
    return _linear(x, weight, bias, ticket.number, bag_number)


def deferred_linear(
    x: Tensor,
    weight: Parameter,
    bias: Parameter | None = None,
    *,
    stage: StageContext,
    comm: Comm = NO_COMM,
    fp8: Fp8 | None = None,
) -> Tensor:
    """x [..., i] -> [..., o] with weight [o..., i] and bias [o...], and the collectives of `comm` around it.

    With a bag in `stage` at the time of the forward, backward defers dW into it (autograd gets None);
    without one dW goes into `weight.main_grad`, or to autograd where there is no main_grad.
    fp8: how the three products are made of 8-bit factors (core/autograd/fp8.py); None: of x, dy and W as they are.
    """
    if torch.compiler.is_compiling():
        collectives = (
            comm.before_forward,
            comm.after_forward,
            comm.before_backward,
            comm.after_backward,
        )
        if collectives == (None, None, None, None) and fp8 is None:
            compiled = _compiled_linear(x, weight, bias, stage)
            if compiled is not None:
                return compiled
        return _outside_compiled_graph(x, weight, bias, stage, comm, fp8)
    # For generated tokens a Function's own overhead counts. Not where the forward has collectives: they would drop
    # the tangents of forward-mode differentiation without a word.
    is_local = comm.before_forward is None and comm.after_forward is None
    plain = fp8 is None and not torch.is_grad_enabled() and linears_of_region.get() is None
    if is_local and plain and not torch.is_autocast_enabled(x.device.type):
        return F.linear(
            x, matrix_of(weight), bias if bias is None or bias.dim() == 1 else bias.view(-1)
        )
    y: Tensor = _DeferredLinear.apply(x, weight, bias, stage, comm, fp8)
    return y


@torch.compiler.disable
def _outside_compiled_graph(
    x: Tensor,
    weight: Parameter,
    bias: Parameter | None,
    stage: StageContext,
    comm: Comm,
    fp8: Fp8 | None,
) -> Tensor:
    """A graph break: collectives around the product, and products of 8 bits, are not traced."""
    y: Tensor = _DeferredLinear.apply(x, weight, bias, stage, comm, fp8)
    return y
