"""Backward in two halves: I (input gradients) is one ordinary backward, W (weight gradients) empties a bag.

The bag is not an argument of I: the operations that defer took it from their `StageContext` in forward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from core.autograd import WeightGradBag


def _leaves(tree: Any) -> list:
    return pytree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, GradientEdge))


def _facts(output: Tensor | GradientEdge) -> tuple[torch.Size, torch.dtype, torch.device]:
    if isinstance(output, Tensor):
        return output.shape, output.dtype, output.device
    made = output.node._input_metadata[output.output_nr]
    return torch.Size(made.shape), made.dtype, made.device


def _has_graph(output: Any) -> bool:
    return isinstance(output, GradientEdge) or (isinstance(output, Tensor) and output.requires_grad)


def _with_ones(outputs: list) -> list:
    """No gradients given: every output is a loss."""
    ones: list[Tensor | None] = []
    for output in outputs:
        if not _has_graph(output):
            ones.append(None)
            continue
        shape, dtype, device = _facts(output)
        if shape.numel() != 1:
            raise ValueError(
                f"an output of shape {tuple(shape)} is not a loss of 1 number and has no gradient; pass output_grads"
            )
        ones.append(torch.ones(shape, dtype=dtype, device=device))
    return ones


def _check(place: int, output: Tensor | GradientEdge, gradient: Any) -> None:
    """Autograd itself accepts a wrong dtype, and its words on a wrong shape name no output."""
    shape, dtype, _ = _facts(output)
    if not isinstance(gradient, Tensor):
        raise ValueError(f"the gradient of output {place} is a {type(gradient).__name__}, not a tensor or None")
    if gradient.shape != shape or gradient.dtype != dtype:
        raise ValueError(
            f"output {place} is {tuple(shape)} of {dtype}, its gradient is {tuple(gradient.shape)} of "
            f"{gradient.dtype}; they must agree"
        )


def _check_input(place: int, tensor: Any) -> bool:
    wanted = isinstance(tensor, Tensor) and tensor.requires_grad
    if wanted and not tensor.is_leaf:
        raise ValueError(
            f"input {place} of shape {tuple(tensor.shape)} was computed from other tensors (1 graph for 2 stages); "
            "give the stage x.detach().requires_grad_()"
        )
    return wanted


def stage_backward_input(outputs: Any, output_grads: Any, inputs: Any) -> Any:
    """I: the gradients of `inputs`, in their nesting, None where there is none; the graph dies here.

    outputs: any nesting of tensors and gradient edges (`torch.autograd.graph.get_gradient_edge`, which lets
    the tensor itself go). What is no tensor, or has no graph, is passed over.
    output_grads: the same nesting, None for an output that nobody used; or None as a whole: losses of one
    number each.
    inputs: any nesting of what the stage was called with. Weight gradients wait in the bag of the forward;
    what does not wait is in `main_grad` or `.grad` when this returns. No input keeps a `.grad`.
    Raises ValueError: a gradient of another shape or dtype than its output, another number of gradients than
    of outputs, an output without gradient that is no loss, an input that is not a leaf.
    """
    flat = _leaves(outputs)
    gradients = _with_ones(flat) if output_grads is None else _leaves(output_grads)
    if len(gradients) != len(flat):
        raise ValueError(f"{len(flat)} outputs but {len(gradients)} gradients; pass None for an output without one")
    ends, starts = [], []
    for place, (output, gradient) in enumerate(zip(flat, gradients, strict=True)):
        if gradient is not None and _has_graph(output):
            _check(place, output, gradient)
            ends.append(output)
            starts.append(gradient)
    leaves, spec = pytree.tree_flatten(inputs)
    wanted = [_check_input(place, leaf) for place, leaf in enumerate(leaves)]
    for leaf, want in zip(leaves, wanted, strict=True):
        if want:
            leaf.grad = None
    if ends:
        torch.autograd.backward(ends, starts)
    found: list[Tensor | None] = []
    for leaf, want in zip(leaves, wanted, strict=True):
        found.append(leaf.grad if want else None)  # an input given twice: once its gradient, then None
        if want:
            leaf.grad = None
    return pytree.tree_unflatten(found, spec)


def stage_backward_weight(bag: WeightGradBag) -> None:
    """W: every weight gradient that waits in the bag, newest first."""
    bag.run()


def stage_backward(outputs: Any, output_grads: Any, inputs: Any, bag: WeightGradBag | None = None) -> Any:
    """I, then W of `bag` (the one that the stage's forward saw); returns what I returns.

    Raises ValueError as `stage_backward_input`.
    """
    gradients = stage_backward_input(outputs, output_grads, inputs)
    if bag is not None:
        bag.run()
    return gradients
