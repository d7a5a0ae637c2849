"""Output layer and cross entropy in chunks of tokens: nothing of the vocabulary's width is kept.

    forward   logits of a chunk -> their logsumexp and the label's logit; the logits are forgotten
    I         the logits again, their gradient in place, dx and dW of the chunk

Weights are split by vocabulary over the tensor ranks. Letters: n tokens, h hidden, v vocabulary columns of this rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from core.autograd import Comm, StageContext, main_grad_of
from core.autograd.gradients import delivers, no_second_derivative, overwritten
from core.autograd.products import add_product
from core.autograd.recomputation.two_runs import recomputed_region
from core.parallel_state.collectives import Group, all_gather
from core.tensor_parallel.cross_entropy import compute_dtype, exp_sums, logits_to_gradient


class _Arrived:
    """In the bag of a microbatch: this parameter's gradient is complete once W comes here; nothing is left to do."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def run(self) -> None:
        """The gradient was added in I already."""


class _Labels:
    """Which rank's column each label is. labels [n]; `first`: the number of this rank's first column."""

    def __init__(
        self, labels: Tensor, columns: int, group: Group | None, vocab: int, ignore: int
    ) -> None:
        first = group.rank * columns if group is not None else 0
        # the last ranks may hold padding
        self.true_columns = max(0, min(columns, vocab - first))
        self.counted = labels != ignore
        local = labels - first
        self.is_local = (local >= 0) & (local < self.true_columns) & self.counted
        self.local = local.masked_fill(~self.is_local, 0)


def _chunks(
    x: Tensor, matrix: Tensor, chunk: int, true_columns: int
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits [rows, v], padded columns at -inf) of x [n, h]; one buffer for all of them."""
    buffer = x.new_empty(min(chunk, x.shape[0]), matrix.shape[0])
    for first in range(0, x.shape[0], chunk):
        rows = slice(first, min(first + chunk, x.shape[0]))
        logits = buffer[: rows.stop - first]
        torch.mm(x[rows], matrix.t(), out=logits)
        logits[:, true_columns:] = -torch.inf
        yield rows, logits


class _HeadLoss(torch.autograd.Function):
    """The Parameter is kept on ctx, never in save_for_backward: a checkpoint's pack hook would detach it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        labels: Tensor,
        stage: StageContext,
        comm: Comm,
        group: Group | None,
        vocab: int,
        chunk: int,
        ignore: int,
    ) -> Tensor:
        # autocast does not reach into a Function: it must cast its inputs itself
        device_type = x.device.type
        matrix = weight
        operand = x
        if torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
            operand = x.to(torch.get_autocast_dtype(device_type))
            matrix = weight.to(operand.dtype)  # type: ignore[assignment]
        if comm.before_forward is not None:
            gathered = comm.before_forward(operand)
        else:
            gathered = operand
        flat = gathered.reshape(-1, gathered.shape[-1])
        dtype = compute_dtype(operand.dtype)
        label_columns = _Labels(labels.reshape(-1), weight.shape[0], group, vocab, ignore)
        # max, sum of exponentials, label's logit
        local = torch.empty(3, flat.shape[0], dtype=dtype, device=x.device)
        for rows, logits in _chunks(flat, matrix, chunk, label_columns.true_columns):
            local[2, rows] = logits.gather(1, label_columns.local[rows, None])[:, 0].to(dtype)
            local[0, rows], local[1, rows] = exp_sums(logits)
        local[2].masked_fill_(~label_columns.is_local, 0)
        per_rank = all_gather(local[None], group)  # [tp, 3, n]
        # each rank's sums are relative to its own maximum; here they become relative to that of the whole row
        row_max = per_rank[:, 0].amax(0)
        logsumexp = (per_rank[:, 1] * (per_rank[:, 0] - row_max).exp()).sum(0).log() + row_max
        loss = (logsumexp - per_rank[:, 2].sum(0)).masked_fill_(~label_columns.counted, 0)
        ctx.save_for_backward(operand, logsumexp)
        ctx.weight = weight
        ctx.labels = label_columns
        ctx.version = weight._version
        ctx.bag = stage.bag
        ctx.comm = comm
        ctx.chunk = chunk
        ctx.dtype = x.dtype
        ctx.region = recomputed_region.get()
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise no_second_derivative("the output layer's loss in chunks")
        weight = ctx.weight
        comm = ctx.comm
        label_columns = ctx.labels
        if weight._version != ctx.version:
            raise overwritten(weight, ctx.version)
        operand, logsumexp = ctx.saved_tensors
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        if comm.before_forward is not None:
            x = comm.before_forward(operand)
        else:
            x = operand
        flat = x.reshape(-1, x.shape[-1])
        matrix = weight.detach().to(x.dtype)
        grad_loss = gradient.reshape(-1).to(logsumexp.dtype) * label_columns.counted
        # with a main_grad, chunks add their products straight into it; else autograd is given a sum of their own
        past_autograd = wants_dw and delivers(ctx, weight, ctx.region)
        target = main_grad_of(weight) if past_autograd else None
        dw = target
        if wants_dw and dw is None:
            dw = torch.zeros(weight.shape, dtype=compute_dtype(x.dtype), device=x.device)
        dx = torch.empty_like(flat) if wants_dx else None
        for rows, logits in _chunks(flat, matrix, ctx.chunk, label_columns.true_columns):
            logits_to_gradient(
                logits,
                logsumexp[rows],
                grad_loss[rows],
                label_columns.local[rows],
                label_columns.is_local[rows],
            )
            if dx is not None:
                torch.mm(logits, matrix, out=dx[rows])
            if dw is not None:
                add_product(dw, flat[rows], logits)
        # W has nothing to compute, but who counts gradients is told of this parameter there
        if target is not None and ctx.bag is not None and ctx.bag.open:
            ctx.bag.put(_Arrived(weight))
        if dx is not None:
            # of this rank's columns only: the sum over tensor ranks, or this rank's rows of it
            dx = dx.view(x.shape)
            dx = (comm.after_backward(dx).wait() if comm.after_backward is not None else dx).to(
                ctx.dtype
            )
        returned = None
        if target is None and dw is not None:
            returned = dw.to(weight.dtype)
        return dx, returned, None, None, None, None, None, None, None


@torch.compiler.disable
def head_loss(
    x: Tensor,
    weight: Parameter,
    labels: Tensor,
    *,
    stage: StageContext,
    comm: Comm,
    group: Group | None,
    vocab_size: int,
    chunk: int,
    ignore_index: int = -100,
) -> Tensor:
    """Loss per token [s, b] (float32, or float64) of x [s, b, h] ([s/tp, b, h] under sequence parallelism).

    weight [v_padded/tp, h], tied or not; labels int64 [s, b]. Holds x and one number per token; logits exist `chunk`
    tokens at a time, twice: a product more than the whole logits would take. dW is computed in I.
    Collectives over tp: one all-gather of three numbers per token, and those of the output layer.
    """
    loss: Tensor = _HeadLoss.apply(
        x, weight, labels, stage, comm, group, vocab_size, chunk, ignore_index
    )
    return loss
