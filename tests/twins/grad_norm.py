"""The gradient norm summed parameter by parameter: what the norm over buckets is compared with."""

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter

from core.optimizer.step.grad_norm import sum_of_squares
from core.parallel_state.collectives import all_reduce
from core.parallel_state.layout import layout_of, true_part
from core.parallel_state.state import ParallelState


def squared_grad_norm(parameters: Iterable[Parameter], ps: ParallelState) -> Tensor:
    """Sum of squares of all (already summed) `main_grad`, as a float64 tensor of shape [].

    A rank counts the parameters that it owns by their `Layout`, without padded rows. One all-reduce over
    `ps.world`; every rank gets the same bits, and nothing waits for an accelerator.
    """
    owned = []
    for parameter in parameters:
        layout = layout_of(parameter)
        if layout.owned_by(ps.coordinate):
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            part = true_part(gradient, layout, ps.coordinate, ps.sizes).detach()
            owned.append(part.float() if part.dtype.itemsize < 4 else part)  # a 16-bit norm would be 16-bit exact
    total = sum_of_squares([g for g in owned if g.numel()], ps.device).reshape(1)
    return all_reduce(total, ps.world)[0]
