"""Rows of a table, possibly only part of it, whose weight gradient can wait in the microbatch's bag."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from core.autograd.bag import StageContext, accumulate, delivers
from core.autograd.main_grad import main_grad_of
from core.autograd.products import NO_COMM, Comm
from core.autograd.recompute import running_again


def _local_ids(ids: Tensor, first: int, rows: int) -> Tensor:
    """Ids as rows of the part [first, first + rows); those outside become `rows`, one past the end."""
    local = ids - first
    return local.masked_fill_((local < 0) | (local >= rows), rows)


def _add_rows(parameter: Parameter, local: Tensor, gy: Tensor, whole: bool, directly: bool = True) -> Tensor | None:
    """Sum dy into the table's rows: `directly` into a main_grad (None is returned), else a new dense gradient."""
    rows = parameter.shape[0]
    local, gy = local.reshape(-1), gy.reshape(-1, gy.shape[-1])
    main_grad = main_grad_of(parameter) if directly else None
    if main_grad is None:
        if whole:
            return torch.ops.aten.embedding_dense_backward(gy, local, rows, -1, False)
        return torch.ops.aten.embedding_dense_backward(gy, local, rows + 1, rows, False)[:rows]
    if not whole:
        gy, local = gy.masked_fill((local == rows)[:, None], 0), local.clamp_max(rows - 1)
    main_grad.index_add_(0, local, gy.to(main_grad.dtype))
    return None


class _EmbeddingThunk:
    """dW of one use: holds only the ids and dy."""

    __slots__ = ("_comm", "_gy", "_local", "_whole", "parameter")

    def __init__(self, parameter: Parameter, local: Tensor, gy: Tensor, whole: bool, comm: Comm) -> None:
        self.parameter, self._local, self._gy, self._whole, self._comm = parameter, local, gy, whole, comm

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self._local, self._gy

    def run(self) -> None:
        gy = self._gy if self._comm.before_backward is None else self._comm.before_backward(self._gy)
        gradient = _add_rows(self.parameter, self._local, gy, self._whole)
        if gradient is not None:
            accumulate(self.parameter, gradient)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Parameter, first: int, whole: bool, stage: StageContext, comm: Comm
    ) -> Tensor:
        if whole:
            local = ids
            y = F.embedding(ids, weight)
        else:
            rows = weight.shape[0]
            local = _local_ids(ids, first, rows)
            y = F.embedding(local.clamp_max(rows - 1), weight)
            y.masked_fill_((local == rows)[..., None], 0)
        if comm.after_forward is not None:
            y = comm.after_forward(y)
        if y._is_view():  # autograd lets nobody write into a view that a Function returns
            y = y.detach()
        ctx.save_for_backward(local)
        ctx.weight, ctx.whole, ctx.comm, ctx.bag = weight, whole, comm, stage.bag
        ctx.region = running_again.get()
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        (local,) = ctx.saved_tensors
        directly = delivers(ctx, ctx.weight, ctx.region)
        if directly and ctx.bag is not None and ctx.bag.open:
            ctx.bag.put(_EmbeddingThunk(ctx.weight, local, gy, ctx.whole, ctx.comm))
            return (None,) * 6
        if ctx.comm.before_backward is not None:
            gy = ctx.comm.before_backward(gy)
        return None, _add_rows(ctx.weight, local, gy, ctx.whole, directly), None, None, None, None


def deferred_embedding(
    ids: Tensor,
    weight: Parameter,
    *,
    first: int = 0,
    whole: bool = True,
    stage: StageContext,
    comm: Comm = NO_COMM,
) -> Tensor:
    """ids [...] -> [..., h]: rows of `weight` [n, h]. Unless `whole`, the table is the part [first, first + n)
    of a larger one, and ids outside it give zero rows (to be summed over the ranks by `comm`)."""
    if torch.compiler.is_compiling():
        return _eagerly(ids, weight, first, whole, stage, comm)
    y: Tensor = _Embedding.apply(ids, weight, first, whole, stage, comm)
    return y


@torch.compiler.disable
def _eagerly(ids: Tensor, weight: Parameter, first: int, whole: bool, stage: StageContext, comm: Comm) -> Tensor:
    """A break in the compiled graph: a lookup has nothing to be fused with."""
    y: Tensor = _Embedding.apply(ids, weight, first, whole, stage, comm)
    return y
