"""Vocabulary-parallel cross entropy (arXiv 1909.08053, section 3), in one buffer and one collective.

Each rank reduces its own columns to (max, sum of exponentials, logit of the label); one all-gather of these
three numbers per token gives every rank the whole row's log-sum-exp. The logits' buffer is overwritten by the
exponentials, and those in backward by the gradient, so nothing else of that size ever exists.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from core.autograd.gradients import no_second_derivative
from core.autograd.graph import nodes_behind
from core.parallel_state.collectives import Group, all_gather, all_reduce
from core.parallel_state.layout import layout_of
from core.parallel_state.value_range import check_range
from core.tensor_parallel.mappings import check_group, outside_graphs

# the linear that makes logits is the last function but for views or a conversion
_LAST_NODES = 8
# elements at a time that stay in a core's cache
_CPU_CHUNK = 1 << 19
# Elsewhere a pass over 128 MiB of float32 takes some 50 us (4 TB/s), ten times the launch of a kernel; a larger chunk
# is only more memory at the peak of a step.
_DEVICE_CHUNK = 1 << 25


def _chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits), a chunk at a time."""
    size = _CPU_CHUNK if logits.device.type == "cpu" else _DEVICE_CHUNK
    rows = max(1, size // max(1, logits.shape[1]))
    for first in range(0, logits.shape[0], rows):
        chunk_rows = slice(first, min(first + rows, logits.shape[0]))
        yield chunk_rows, logits[chunk_rows]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of what is summed over the vocabulary."""
    if dtype in (torch.float32, torch.float64):
        return dtype
    return torch.float32


def _exponentials(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Overwrite logits [n, v] by exp(logits - row max); returns (row max, row sum) [n] in `dtype`.

    A row of padding only (-inf) has the lowest finite max, so its exponentials are 0 and not NaN.
    """
    local_max = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
    local_sum = torch.empty_like(local_max)
    lowest = torch.finfo(dtype).min
    for rows, chunk in _chunks(logits):
        values = chunk if chunk.dtype == dtype else chunk.to(dtype)
        torch.amax(values, -1, out=local_max[rows])
        row_max = local_max[rows].clamp_(min=lowest)
        values.sub_(row_max[:, None]).exp_()
        torch.sum(values, -1, out=local_sum[rows])
        if values is not chunk:
            chunk.copy_(values)
    return local_max, local_sum


def _scale_rows(matrix: Tensor, factor: Tensor) -> None:
    """matrix [n, v] *= factor [n, 1], multiplied in factor's dtype."""
    for rows, chunk in _chunks(matrix):
        if chunk.dtype == factor.dtype:
            chunk.mul_(factor[rows])
        else:
            chunk.copy_(chunk.to(factor.dtype).mul_(factor[rows]))


def exp_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(max, sum of exp(logit - max)) [n] of each row of logits [n, v], which are overwritten."""
    dtype = compute_dtype(logits.dtype)
    local_max = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
    local_sum = torch.empty_like(local_max)
    for rows, chunk in _chunks(logits):
        values = chunk if chunk.dtype == dtype else chunk.to(dtype)
        torch.amax(values, -1, out=local_max[rows])
        # a row of padding only
        local_max[rows].clamp_(min=torch.finfo(dtype).min)
        torch.sum(values.sub_(local_max[rows, None]).exp_(), -1, out=local_sum[rows])
    return local_max, local_sum


def logits_to_gradient(
    logits: Tensor, logsumexp: Tensor, grad_loss: Tensor, label: Tensor, has_label: Tensor
) -> None:
    """Overwrite logits [n, v] by their gradient, (softmax - onehot(label)) x grad_loss.

    logsumexp, grad_loss: [n], of whole rows. label [n]: its column here, where `has_label`.
    """
    dtype = logsumexp.dtype
    for rows, chunk in _chunks(logits):
        values = chunk if chunk.dtype == dtype else chunk.to(dtype)
        values.sub_(logsumexp[rows, None]).exp_().mul_(grad_loss[rows, None])
        if values is not chunk:
            chunk.copy_(values)
    _subtract_at_labels(logits, label, (grad_loss * has_label).to(logits.dtype))


def _subtract_at_labels(gradient: Tensor, label: Tensor, values: Tensor) -> None:
    """gradient [n, v] minus values [n] at the labels' columns [n]."""
    # one element a row: index_add_ on the flat buffer, because scatter_add_ copies the whole of it on CPU
    row_starts = torch.arange(0, gradient.numel(), gradient.shape[1], device=gradient.device)
    gradient.view(-1).index_add_(0, label + row_starts, values, alpha=-1)


class _CrossEntropy(torch.autograd.Function):
    """loss = log(sum over v of exp(x_v)) - x_label, and its gradient softmax(x) - onehot(label), both by columns."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: Group | None,
        vocab: int,
        smoothing: float,
        ignore: int,
    ) -> Tensor:
        columns = logits.shape[-1]
        flat = logits.detach().view(-1, columns)
        target = labels.reshape(-1)
        dtype = compute_dtype(flat.dtype)
        first = group.rank * columns if group is not None else 0
        # the last ranks may hold padding
        true_columns = max(0, min(columns, vocab - first))
        counted = target != ignore

        # The label's logit, on the rank that has its column; 0 on the others.
        local_label = target - first
        is_local = (local_label >= 0) & (local_label < true_columns) & counted
        local_label = local_label.masked_fill(~is_local, 0)[:, None]
        label_logit = flat.gather(1, local_label)[:, 0].to(dtype).masked_fill(~is_local, 0)
        # smoothing takes a share of the loss of every class: the mean over the true columns of all ranks
        mean_logit = None
        if smoothing:
            mean_logit = all_reduce(flat[:, :true_columns].sum(-1, dtype=dtype), group).div_(vocab)
        if true_columns < columns:
            flat[:, true_columns:] = -torch.inf

        # This rank's columns become (max, sum of exponentials); one all-gather makes these the row's.
        local_max, local_sum = _exponentials(flat, dtype)
        row_max = local_max
        row_sum = local_sum
        if group is not None:
            # [tp, 3, n]
            per_rank = all_gather(torch.stack((local_max, local_sum, label_logit))[None], group)
            row_max = per_rank[:, 0].amax(0)
            row_sum = (per_rank[:, 1] * (per_rank[:, 0] - row_max).exp()).sum(0)
            label_logit = per_rank[:, 2].sum(0)
        loss = row_sum.log() + row_max
        if mean_logit is not None:
            loss -= (1 - smoothing) * label_logit + smoothing * mean_logit
        else:
            loss -= label_logit

        # exponential * probability_factor is the softmax: all that backward needs
        probability_factor = (local_max - row_max).exp_() / row_sum * counted
        ctx.save_for_backward(local_label, is_local, probability_factor, counted)
        ctx.exponentials = flat
        ctx.true_columns = true_columns
        ctx.smoothing = smoothing
        ctx.vocab = vocab
        return loss.masked_fill_(~counted, 0).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise no_second_derivative("vocab_parallel_cross_entropy")
        # the buffer becomes its own gradient: a second backward would find that in it
        if ctx.exponentials is None:
            raise RuntimeError(
                "vocab_parallel_cross_entropy overwrote its buffer: backward works once per forward. Run the "
                "forward again, or compute the loss from logits (model(tokens), gather_logits, F.cross_entropy)"
            )
        local_label, is_local, probability_factor, counted = ctx.saved_tensors
        grad_logits = ctx.exponentials
        ctx.exponentials = None
        grad_loss = gradient.reshape(-1).to(probability_factor.dtype)
        _scale_rows(grad_logits, (probability_factor * grad_loss)[:, None])
        if ctx.smoothing:
            uniform = grad_loss * counted * (ctx.smoothing / ctx.vocab)
            grad_logits[:, : ctx.true_columns] -= uniform[:, None].to(grad_logits.dtype)
        label_gradient = (is_local * grad_loss * (1 - ctx.smoothing)).to(grad_logits.dtype)
        _subtract_at_labels(grad_logits, local_label[:, 0], label_gradient)
        return (
            grad_logits.view(*gradient.shape, grad_logits.shape[-1]),
            None,
            None,
            None,
            None,
            None,
        )


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: Group | None = None,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    inplace: bool = False,
) -> Tensor:
    """Per-token loss [...] (float32, or float64) of logits [..., v_padded/tp] against labels [...].

    `vocab_size`: true columns, all ranks together (those after it are padding: no loss, no gradient); default
    those of the weight that made the logits, else all.
    Labels of `ignore_index` give loss 0 and no gradient. `label_smoothing` is torch.nn.functional's, over
    the true vocabulary. With `inplace` the logits are overwritten (their gradient will be the same memory).
    Backward works once. Collectives over `group`: one all-gather of three
    numbers per token (and one all-reduce of one with smoothing).
    Raises ValueError: shapes that disagree, a group that is none of ours, or none for a part of the columns; a label
    that is no class.
    """
    if group is not None:
        check_group(group, "vocab_parallel_cross_entropy")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} need labels {tuple(logits.shape[:-1])}, got {tuple(labels.shape)}"
        )
    if vocab_size is None:
        vocab_size = true_columns(logits, 1 if group is None else group.size)
    buffer = logits
    if not (inplace and logits.is_contiguous()):
        buffer = logits.clone(memory_format=torch.contiguous_format)
    return _loss(buffer, group, labels, vocab_size, label_smoothing, ignore_index)


def true_columns(logits: Tensor, ranks: int) -> int:
    """All of them, or those of the table with padded rows (`VocabParallelEmbedding`'s, tied) that made them.

    Raises ValueError: the weight that made them is split, and nothing else is said to be.
    """
    columns = logits.shape[-1] * ranks
    if not torch.compiler.is_compiling():
        for node in islice(nodes_behind([logits.grad_fn]), _LAST_NODES):
            table = getattr(node, "variable", None)
            if table is None:
                continue
            layout = layout_of(table)
            if ranks == 1 and "tp" in layout.split and table.shape[0] == columns:
                whole = layout.padded_shape()[0]
                if whole > columns:
                    raise ValueError(
                        f"vocab_parallel_cross_entropy has logits of {columns} columns, this tensor rank's part of "
                        f"{whole}, and no group: give the third argument, group=place.group (Placement.of(ps).group)"
                    )
            if layout.padding and layout.padded_shape()[0] == columns:
                return layout.shape[0]
    return columns


@outside_graphs
def _loss(
    logits: Tensor, group: Group | None, labels: Tensor, vocab: int, smoothing: float, ignore: int
) -> Tensor:
    if not torch.compiler.is_compiling():
        check_range("labels", labels, vocab, ignored=ignore)
    loss: Tensor = _CrossEntropy.apply(logits, labels, group, vocab, smoothing, ignore)
    return loss
