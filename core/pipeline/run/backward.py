"""The split backward of zero-bubble schedules: I computes input gradients, W computes weight gradients.

I is one ordinary autograd backward in which linear layers leave their weight gradients undone, in a `WeightGradBag`;
W empties that bag. The bag is not an argument of I: the operations took it from their `StageContext` in forward.
The executor runs these functions for every microbatch, and users may call them for a schedule of their own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from core.autograd import WeightGradBag

# what flat lists may hold to be taken as they are; subclasses of Tensor go through pytree, which is right as well
_OUTPUT_TYPES: set[Any] = {Tensor, GradientEdge, type(None)}
_TENSOR_ONLY: set[Any] = {Tensor}


def _flatten_outputs(tree: Any) -> list[Any]:
    # the executor passes flat lists: pytree costs as much as a small backward
    if type(tree) is list and _OUTPUT_TYPES.issuperset(map(type, tree)):
        return tree
    return pytree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, GradientEdge))


def _metadata(output: Tensor | GradientEdge) -> tuple[torch.Size, torch.dtype, torch.device]:
    if isinstance(output, Tensor):
        return output.shape, output.dtype, output.device
    metadata = output.node._input_metadata[output.output_nr]
    return torch.Size(metadata.shape), metadata.dtype, metadata.device


def _has_graph(output: Any) -> bool:
    if isinstance(output, GradientEdge):
        return True
    return isinstance(output, Tensor) and output.requires_grad


def _loss_gradients(outputs: Iterable[Any]) -> list[Tensor | None]:
    """Without output gradients every output must be a loss, whose gradient is 1."""
    gradients: list[Tensor | None] = []
    for output in outputs:
        if not _has_graph(output):
            gradients.append(None)
            continue
        shape, dtype, device = _metadata(output)
        if shape.numel() != 1:
            raise ValueError(
                f"an output of shape {tuple(shape)} is not a loss of 1 number and has no gradient; pass output_grads"
            )
        gradients.append(torch.ones(shape, dtype=dtype, device=device))
    return gradients


def _check_output_gradient(index: int, output: Tensor | GradientEdge, gradient: Any) -> None:
    # autograd accepts a wrong dtype, and its own error about a wrong shape does not name the output
    shape, dtype, _ = _metadata(output)
    if not isinstance(gradient, Tensor):
        raise ValueError(
            f"the gradient of output {index} is a {type(gradient).__name__}, not a tensor or None"
        )
    if gradient.shape != shape or gradient.dtype != dtype:
        raise ValueError(
            f"output {index} is {tuple(shape)} of {dtype}, its gradient is {tuple(gradient.shape)} of "
            f"{gradient.dtype}; they must agree"
        )


def _check_leaves(inputs: Sequence[Any]) -> None:
    for index, leaf in enumerate(inputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
            raise ValueError(
                f"input {index} of shape {tuple(leaf.shape)} was computed from other tensors (1 graph for 2 "
                "stages); give the stage x.detach().requires_grad_()"
            )


def stage_backward_input(
    outputs: Any, output_grads: Any, inputs: Any, *, adds: bool = False
) -> Any:
    """I: returns the gradients of `inputs`, in their nesting, None where there is none; the graph is freed.

    outputs: any nesting of tensors and gradient edges (`torch.autograd.graph.get_gradient_edge`, which keeps the
    graph without the memory of the tensor itself). Anything else, or a tensor without a graph, is skipped.
    output_grads: the same nesting, None for an output that nobody used. `output_grads=None`: every output is a
    loss of one number.
    inputs: any nesting of what the stage was called with. Deferred weight gradients wait in the bag that forward
    saw; all others are in `main_grad` or `.grad` when this returns. No input keeps a `.grad`.
    adds: to the `.grad` that inputs have, of a `loss.backward()` inside of the stage's forward.
    Raises ValueError: a gradient of another shape or dtype than its output, another number of gradients than
    of outputs, an output without gradient that is no loss, an input that is not a leaf.
    """
    # one gradient per output, None where nobody used it
    flat_outputs = _flatten_outputs(outputs)
    if output_grads is None:
        flat_grads = _loss_gradients(flat_outputs)
    else:
        flat_grads = _flatten_outputs(output_grads)
    if len(flat_grads) != len(flat_outputs):
        raise ValueError(
            f"{len(flat_outputs)} outputs but {len(flat_grads)} gradients; pass None for an output without one"
        )

    # the roots of the backward: outputs that have both a graph and a gradient
    roots, root_grads = [], []
    for index, (output, gradient) in enumerate(zip(flat_outputs, flat_grads, strict=True)):
        if gradient is not None and _has_graph(output):
            _check_output_gradient(index, output, gradient)
            roots.append(output)
            root_grads.append(gradient)

    # the leaves at which the backward ends, and where their gradients appear
    if type(inputs) is list and _TENSOR_ONLY.issuperset(map(type, inputs)):  # as above: no pytree
        leaves, nesting = inputs, None
    else:
        leaves, nesting = pytree.tree_flatten(inputs)
    _check_leaves(leaves)
    for leaf in leaves:
        # autograd would add to what an earlier use left there
        if isinstance(leaf, Tensor) and leaf.requires_grad and not adds:
            leaf.grad = None

    if roots:
        torch.autograd.backward(roots, root_grads)

    input_grads: list[Tensor | None] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            input_grads.append(leaf.grad)
            # an input that stands twice in `inputs` gets its gradient once, then None
            leaf.grad = None
        else:
            input_grads.append(None)
    if nesting is None:
        return input_grads
    return pytree.tree_unflatten(input_grads, nesting)


def stage_backward_weight(
    bag: WeightGradBag, on_ready: Callable[[nn.Parameter], None] | None = None
) -> None:
    """W: computes every weight gradient that waits in the bag, newest first, so that memory falls with each.

    on_ready: called with each parameter after its last use in this bag was added to its gradient, while others
    still wait: data parallelism starts to reduce full buckets there.
    """
    if on_ready is None:
        bag.run()
        return
    remaining_uses = Counter(bag.parameters())
    while len(bag):
        parameter = bag.run_one()
        remaining_uses[parameter] -= 1
        if not remaining_uses[parameter]:
            on_ready(parameter)


def stage_backward(
    outputs: Any, output_grads: Any, inputs: Any, bag: WeightGradBag | None = None
) -> Any:
    """I, then W of `bag` (the one that the stage's forward saw); returns the input gradients, as I does.

    Raises ValueError as `stage_backward_input`.
    """
    input_grads = stage_backward_input(outputs, output_grads, inputs)
    if bag is not None:
        stage_backward_weight(bag)
    return input_grads
