"""The deferring linear inside compiled code: one operation for the product, one that puts a thunk into the bag.

A compiled graph holds tensors and numbers only, and is called again with others: the parameter and the bag are
reached by tickets (core/autograd/tickets.py). The putting operation is registered as having an effect; else the
compiler would drop it (nobody uses what it returns) or merge two equal calls (a weight used twice), without a word.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from core.autograd.bag import StageContext
from core.autograd.products import NO_COMM, LinearThunk, matrix_of
from core.autograd.tickets import NO_DEFERRAL, Ticket, found


def _has_hooks(parameter: Tensor) -> bool:
    owned = getattr(parameter, "main_grad", None) is not None
    return bool(parameter._backward_hooks or (parameter._post_accumulate_grad_hooks and not owned))


def _is_ours_or_plain(parameter: Tensor) -> bool:
    """A dense tensor; a class of ours may carry facts, but not change what operations do."""
    kind = type(parameter)
    return isinstance(parameter, Parameter) and kind.__torch_dispatch__ is Parameter.__torch_dispatch__


@torch.compiler.disable
def make_compilable(parameter: Parameter) -> None:
    """Make this parameter's linear compilable: outside of the graph, at its first call."""
    if parameter.is_leaf and not _has_hooks(parameter) and _is_ours_or_plain(parameter):
        parameter._deferral = Ticket(parameter)  # type: ignore[attr-defined]


@torch.library.custom_op("paracore::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, parameter: Tensor, bag: Tensor) -> Tensor:
    return F.linear(x, matrix_of(weight).to(x.dtype), None if bias is None else bias.reshape(-1).to(x.dtype))


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, parameter: Tensor, bag: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], matrix_of(weight).shape[0]))


@torch.library.custom_op("paracore::defer", mutates_args=())
def _defer(x: Tensor, gy: Tensor, weight: Tensor, parameter: Tensor, bag: Tensor) -> None:
    """Clones: the compiler writes its next tensors into the memory of those that it no longer needs."""
    owner, into = found(parameter), found(bag)
    if owner is None or owner.data_ptr() != weight.data_ptr():
        raise RuntimeError(f"a compiled linear lost its parameter of shape {list(weight.shape)}; compile again")
    if _has_hooks(owner):
        raise RuntimeError(
            f"a hook was put on a parameter of shape {list(weight.shape)} after its linear was compiled, and would "
            "see no gradient; register hooks first, then call torch.compiler.reset()"
        )
    if int(bag) and into is None:
        raise RuntimeError("the bag of this microbatch is gone before its backward; keep it until W")
    if into is None or not into.open:
        LinearThunk(owner, x, gy, NO_COMM).run()
    else:
        into.put(LinearThunk(owner, x.clone(), gy.clone(), NO_COMM))


@_defer.register_fake
def _(x: Tensor, gy: Tensor, weight: Tensor, parameter: Tensor, bag: Tensor) -> None:
    return None


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, parameter, bag = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, parameter, bag)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)


def _backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, parameter, bag = ctx.saved_tensors
    dx = gy.matmul(matrix_of(weight).to(gy.dtype)) if ctx.needs_input_grad[0] else None
    if ctx.needs_input_grad[1]:
        torch.ops.paracore.defer(x, gy, weight, parameter, bag)
    db = None
    if ctx.needs_input_grad[2]:
        shape, dtype = ctx.bias
        db = gy.reshape(-1, gy.shape[-1]).sum(0).view(shape).to(dtype)
    return dx, None, db, None, None


_linear.register_autograd(_backward, setup_context=_save)


def _has_effect() -> bool:
    """Tell torch that `defer` has one; private in torch 2.13, so that it may be missing."""
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        _register_effectful_op(torch.ops.paracore.defer.default, _EffectType.ORDERED)
    except (ImportError, AttributeError, TypeError):
        return False
    return True


CAN_COMPILE = _has_effect()


def linear(x: Tensor, weight: Parameter, bias: Tensor | None, stage: StageContext) -> Tensor | None:
    """The linear as an operation of a compiled graph; None where it cannot be one now.

    Without a bag and without `main_grad` it is a plain `F.linear`.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    bag = stage.bag
    if bag is None and getattr(weight, "main_grad", None) is None:
        vector = None if bias is None else bias.reshape(-1).to(x.dtype)
        return F.linear(x, matrix_of(weight).to(x.dtype), vector)
    if not CAN_COMPILE:
        return None
    if getattr(weight, "_deferral", None) is None:
        make_compilable(weight)
        return None
    if bag is None:
        number = NO_DEFERRAL
    elif bag.ticket is not None:
        number = bag.ticket.number
    else:  # a copied bag
        return None
    return _linear(x, weight, bias, weight._deferral.number, number)  # type: ignore[attr-defined]
