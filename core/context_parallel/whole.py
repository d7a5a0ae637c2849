"""Whole sequences of the rows that context ranks hold, for a part that looks along them."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.parallel_state.collectives import Group, all_gather, reduce_scatter
from core.parallel_state.context import ContextRows

if TYPE_CHECKING:
    from core.parallel_state.state import ParallelState


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, order: Tensor) -> Tensor:
        ctx.group = group
        ctx.order = order
        whole = torch.empty_like(x.repeat(group.size, *[1] * (x.dim() - 1)))
        whole[order] = all_gather(x.contiguous(), group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(gradient[ctx.order], ctx.group), None, None


def gather_from_context_region(x: Tensor, ps: "ParallelState", dim: int = 0) -> Tensor:
    """This context rank's rows along `dim`, [s/cp, b, h] -> whole sequences in their order, [s, b, h].

    `ContextRows.of_state(ps).of(y, dim)` cuts this rank's rows of what is made of them. All-gather over cp; in
    backward a reduce-scatter: each rank's gradient comes from the rows that it kept.
    """
    group = ps.group("cp")
    if group is None:
        return x
    s = x.shape[dim] * group.size
    of_ranks = [
        ContextRows(group.size, rank, ps.config.ulysses_ranks).rows(s) for rank in range(group.size)
    ]
    order = torch.cat(of_ranks).to(x.device)
    gathered: Tensor = _GatherRows.apply(x.movedim(dim, 0), group, order)
    return gathered.movedim(0, dim)
