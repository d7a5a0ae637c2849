"""Embedding lookup in a table or a shard of its rows (vocabulary parallelism), with a deferred weight gradient."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from core.autograd.bag import StageContext
from core.autograd.gradients import accumulate, delivers, main_grad_of, no_second_derivative
from core.autograd.products import NO_COMM, Comm
from core.autograd.recomputation.two_runs import recomputed_region


def _to_local_ids(ids: Tensor, first: int, rows: int) -> Tensor:
    """Ids as rows of the shard [first, first + rows); those outside become `rows`, one past the end."""
    local_ids = ids - first
    return local_ids.masked_fill_((local_ids < 0) | (local_ids >= rows), rows)


def _add_rows(
    parameter: Parameter,
    local_ids: Tensor,
    gy: Tensor,
    is_full_table: bool,
    past_autograd: bool = True,
) -> Tensor | None:
    """Sum dy into the table's rows: into `main_grad` or `.grad` (None is returned), else a new dense gradient."""
    rows = parameter.shape[0]
    local_ids = local_ids.reshape(-1)
    gy = gy.reshape(-1, gy.shape[-1])
    target = _sum_so_far(parameter) if past_autograd else None
    if target is None:
        if is_full_table:
            return torch.ops.aten.embedding_dense_backward(gy, local_ids, rows, -1, False)
        # ids of other ranks are `rows`, the padding index: they add nothing
        return torch.ops.aten.embedding_dense_backward(gy, local_ids, rows + 1, rows, False)[:rows]
    if not is_full_table:
        # ids of other ranks add zeros to the last row
        gy = gy.masked_fill((local_ids == rows)[:, None], 0)
        local_ids = local_ids.clamp_max(rows - 1)
    target.index_add_(0, local_ids, gy.to(target.dtype))
    return None


def _sum_so_far(parameter: Parameter) -> Tensor | None:
    """What rows may be added to in place: a few of them cost less than a dense gradient of the whole table."""
    main_grad = main_grad_of(parameter)
    grad = parameter.grad
    if main_grad is not None or grad is None or grad.layout is not torch.strided:
        return main_grad
    # in 16 bits a row that many tokens share would be rounded once for each of them
    if grad.dtype in (torch.float32, torch.float64):
        return grad
    return None


class _EmbeddingThunk:
    """dW of one use: holds only the ids and dy."""

    __slots__ = ("_comm", "_gy", "_is_full_table", "_local_ids", "parameter")

    def __init__(
        self, parameter: Parameter, local_ids: Tensor, gy: Tensor, is_full_table: bool, comm: Comm
    ) -> None:
        self.parameter = parameter
        self._local_ids = local_ids
        self._gy = gy
        self._is_full_table = is_full_table
        self._comm = comm

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self._local_ids, self._gy

    def run(self) -> None:
        if self._comm.before_backward is None:
            gy = self._gy
        else:
            gy = self._comm.before_backward(self._gy)
        gradient = _add_rows(self.parameter, self._local_ids, gy, self._is_full_table)
        if gradient is not None:
            accumulate(self.parameter, gradient)


class _DeferredEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Parameter,
        first: int,
        is_full_table: bool,
        stage: StageContext,
        comm: Comm,
    ) -> Tensor:
        if is_full_table:
            local_ids = ids
            y = F.embedding(ids, weight)
        else:
            rows = weight.shape[0]
            # other ranks' ids look up the last row here; what they find is then set to zero
            local_ids = _to_local_ids(ids, first, rows)
            y = F.embedding(local_ids.clamp_max(rows - 1), weight)
            y.masked_fill_((local_ids == rows)[..., None], 0)
        if comm.after_forward is not None:
            y = comm.after_forward(y)
        # autograd lets nobody write into a view that a Function returns
        if y._is_view():
            y = y.detach()
        ctx.save_for_backward(local_ids)
        ctx.weight = weight
        ctx.is_full_table = is_full_table
        ctx.comm = comm
        ctx.bag = stage.bag
        ctx.region = recomputed_region.get()
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        (local_ids,) = ctx.saved_tensors
        if torch.is_grad_enabled() and not (ctx.is_full_table and ctx.comm is NO_COMM):
            raise no_second_derivative("a tensor-parallel embedding")
        past_autograd = delivers(ctx, ctx.weight, ctx.region)
        if past_autograd and ctx.bag is not None and ctx.bag.open:
            ctx.bag.put(_EmbeddingThunk(ctx.weight, local_ids, gy, ctx.is_full_table, ctx.comm))
            return (None,) * 6
        if ctx.comm.before_backward is not None:
            gy = ctx.comm.before_backward(gy)
        return (
            None,
            _add_rows(ctx.weight, local_ids, gy, ctx.is_full_table, past_autograd),
            None,
            None,
            None,
            None,
        )


def deferred_embedding(
    ids: Tensor,
    weight: Parameter,
    *,
    first: int = 0,
    is_full_table: bool = True,
    stage: StageContext,
    comm: Comm = NO_COMM,
) -> Tensor:
    """ids [...] -> [..., h]: rows of `weight` [n, h]. Unless `is_full_table`, it is the shard [first, first + n)
    of a larger table, and ids outside it give zero rows (to be summed over the ranks by `comm`)."""
    if torch.compiler.is_compiling():
        return _outside_compiled_graph(ids, weight, first, is_full_table, stage, comm)
    y: Tensor = _DeferredEmbedding.apply(ids, weight, first, is_full_table, stage, comm)
    return y


@torch.compiler.disable
def _outside_compiled_graph(
    ids: Tensor, weight: Parameter, first: int, is_full_table: bool, stage: StageContext, comm: Comm
) -> Tensor:
    """A break in the compiled graph: a lookup has nothing to be fused with."""
    y: Tensor = _DeferredEmbedding.apply(ids, weight, first, is_full_table, stage, comm)
    return y
