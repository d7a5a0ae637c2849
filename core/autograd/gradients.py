"""Where a backward puts the gradient of a parameter, and what it refuses: second derivatives, overwritten weights."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def has_main_grad(parameter: Tensor) -> bool:
    """Whether somebody (data parallelism, mostly) owns a buffer that gradients of `parameter` are added to."""
    gradient = getattr(parameter, "main_grad", None)
    return gradient is not None and not getattr(gradient, "is_shown", False)


def is_shown(gradient: Tensor | None) -> bool:
    """Whether a `main_grad` is but another name of `.grad`, for programs that read it."""
    return getattr(gradient, "is_shown", False)


def owner_changed(parameter: Tensor) -> None:
    """Tell compiled code, which does not look at tensors' attributes, that `main_grad` came or went."""
    ticket = getattr(parameter, "_deferral", None)
    if ticket is not None:
        ticket.has_owner = has_main_grad(parameter)


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """The buffer that gradients of `parameter` are added to, in place; None where nobody owns one.

    Its owner may give it memory, or zeros, when the first contribution comes (`take_main_grad`); until then
    `main_grad` itself may be unreadable. So operations that add to it, ours or yours, ask here each time.
    """
    take = getattr(parameter, "take_main_grad", None)
    if take is not None:
        return take()
    gradient: Tensor | None = getattr(parameter, "main_grad", None)
    # asked for every linear of a step: without a call
    return None if getattr(gradient, "is_shown", False) else gradient


def delivers(node: Any, parameter: Tensor, region: Any) -> bool:
    """Whether a backward (`node`, its input 1 the parameter) may add the gradient itself, past autograd.

    Not where autograd needs to see it: a computed weight's own graph, a hook on the parameter
    (`main_grad` has an owner, whose hooks know about None), second derivatives, `torch.autograd.grad`.
    """
    if not parameter.is_leaf or parameter._backward_hooks or torch.is_grad_enabled():
        return False
    hooks = parameter._post_accumulate_grad_hooks
    # an owner has one; a `main_grad` that is only shown is deleted before a forward
    if hooks and (len(hooks) > 1 or getattr(parameter, "main_grad", None) is None):
        return False
    # the region asks for all gradients, and passes them on
    if region is not None and region.in_backward:
        return True
    try:
        return bool(torch._C._will_engine_execute_node(node.next_functions[1][0]))
    except RuntimeError:
        # raised for a leaf that `torch.autograd.grad` asks for
        return False


def overwritten(weight: Tensor, version: int) -> RuntimeError:
    """To be raised where `weight._version != version`, that of the forward; autograd does so for what it saves.

    The comparison stands at each place: it is made for every linear of a step, without a call.
    """
    return RuntimeError(
        f"a weight of shape {list(weight.shape)} was written {weight._version - version} times between a forward "
        "and its backward, which would use the new values; write weights between steps (an optimizer in backward "
        "needs num_microbatches=1), or clone the weight in forward"
    )


def accumulate(parameter: Parameter, gradient: Tensor) -> None:
    """Add a finished gradient into `main_grad` where there is one (never rebinding it), else into `.grad`."""
    gradient = gradient.view(parameter.shape)
    main_grad = main_grad_of(parameter)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    elif parameter.grad.layout is not torch.strided:
        # of a sparse embedding that shares the weight
        parameter.grad = gradient.to(parameter.dtype) + parameter.grad
    else:
        parameter.grad.add_(gradient)


def no_second_derivative(what: str) -> RuntimeError:
    """To be raised by the backward of `what` where a graph of it is wanted (create_graph=True)."""
    return RuntimeError(
        f"{what} has no second derivative, and backward was asked for one (create_graph=True): Hessian-vector "
        "products and gradient penalties need a model of torch's own operations"
    )


def refuse_transforms(what: str) -> None:
    """Raise ValueError inside of torch.func.grad, vmap, jvp and their like. what: whose operations they would see."""
    if torch._C._are_functorch_transforms_active():
        raise ValueError(
            f"{what} inside of a transform of torch.func (functorch: grad, vmap, jvp, jacrev, hessian): its "
            "operations have backwards of their own, which these do not see. torch.autograd.grad gives gradients, a "
            "loop over the samples those of each (torch.func.functional_call alone is right)"
        )
