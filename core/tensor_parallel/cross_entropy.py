"""Cross entropy over a vocabulary split over ranks, in one buffer and one collective.

Each rank reduces its own columns to (max, sum of exponentials, logit of the label); one all-gather of these
three numbers per token gives every rank the whole row's log-sum-exp. The logits' buffer is overwritten by the
exponentials, and those in backward by the gradient, so nothing else of that size ever exists.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from core.autograd.gradients import no_second_derivative
from core.parallel_state.collectives import Group, all_gather, all_reduce
from core.tensor_parallel.mappings import outside_graphs

_CPU_CHUNK = 1 << 19  # elements handled at a time: what stays in a core's cache
_DEVICE_CHUNK = 1 << 27  # ... or what keeps an accelerator busy without a float32 copy of everything


def _chunks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits) a piece at a time."""
    size = _CPU_CHUNK if x.device.type == "cpu" else _DEVICE_CHUNK
    rows = max(1, size // max(1, x.shape[1]))
    for first in range(0, x.shape[0], rows):
        part = slice(first, min(first + rows, x.shape[0]))
        yield part, x[part]


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _exponentials(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Overwrite logits [n, v] by exp(logits - row max); returns (row max, row sum) [n] in `dtype`.

    A row of padding only (-inf) has the lowest finite max, so its exponentials are 0 and not NaN.
    """
    top = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
    total = torch.empty_like(top)
    lowest = torch.finfo(dtype).min
    for rows, part in _chunks(logits):
        wide = part if part.dtype == dtype else part.to(dtype)
        torch.amax(wide, -1, out=top[rows])
        peak = top[rows].clamp_(min=lowest)
        wide.sub_(peak[:, None]).exp_()
        torch.sum(wide, -1, out=total[rows])
        if wide is not part:
            part.copy_(wide)
    return top, total


def _scale(rows_of: Tensor, factor: Tensor) -> None:
    """rows_of [n, v] *= factor [n, 1], multiplied in factor's dtype."""
    for rows, part in _chunks(rows_of):
        if part.dtype == factor.dtype:
            part.mul_(factor[rows])
        else:
            part.copy_(part.to(factor.dtype).mul_(factor[rows]))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: Group | None, vocab: int, smoothing: float, ignore: int
    ) -> Tensor:
        size = logits.shape[-1]
        flat, target = logits.detach().view(-1, size), labels.reshape(-1)
        dtype = _compute_dtype(flat.dtype)
        first = group.rank * size if group is not None else 0
        valid = max(0, min(size, vocab - first))
        local = target - first
        mine = (local >= 0) & (local < valid) & (target != ignore)
        local = local.masked_fill(~mine, 0)[:, None]
        picked = flat.gather(1, local)[:, 0].to(dtype).masked_fill(~mine, 0)
        mean = all_reduce(flat[:, :valid].sum(-1, dtype=dtype), group).div_(vocab) if smoothing else None
        if valid < size:
            flat[:, valid:] = -torch.inf
        top, total = _exponentials(flat, dtype)
        peak, whole = top, total
        if group is not None:
            each = all_gather(torch.stack((top, total, picked))[None], group)  # [tp, 3, n]
            peak = each[:, 0].amax(0)
            whole = (each[:, 1] * (each[:, 0] - peak).exp()).sum(0)
            picked = each[:, 2].sum(0)
        loss = whole.log() + peak
        if mean is not None:
            loss -= (1 - smoothing) * picked + smoothing * mean
        else:
            loss -= picked
        kept = target != ignore
        ctx.save_for_backward(local, mine, (top - peak).exp_() / whole * kept, kept)
        ctx.exponentials, ctx.valid, ctx.smoothing, ctx.vocab = flat, valid, smoothing, vocab
        return loss.masked_fill_(~kept, 0).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise no_second_derivative("vocab_parallel_cross_entropy")
        if ctx.exponentials is None:
            raise RuntimeError("vocab_parallel_cross_entropy overwrote its buffer: backward works once per forward")
        local, mine, probability, kept = ctx.saved_tensors
        out, ctx.exponentials = ctx.exponentials, None
        g = gradient.reshape(-1).to(probability.dtype)
        _scale(out, (probability * g)[:, None])
        if ctx.smoothing:
            out[:, : ctx.valid] -= (g * kept * (ctx.smoothing / ctx.vocab))[:, None].to(out.dtype)
        hit = (mine * g * (ctx.smoothing - 1)).to(out.dtype)
        # one element a row: index_add_ on the flat buffer, because scatter_add_ copies the whole of it on CPU
        flat_index = local[:, 0] + torch.arange(0, out.numel(), out.shape[1], device=out.device)
        out.view(-1).index_add_(0, flat_index, hit)
        return out.view(*gradient.shape, out.shape[-1]), None, None, None, None, None


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
    all.
    Labels of `ignore_index` give loss 0 and no gradient. `label_smoothing` is torch.nn.functional's, over
    the true vocabulary. With `inplace` the logits are overwritten (their gradient will be the same memory).
    Backward works once. Collectives over `group`: one all-gather of three
    numbers per token (and one all-reduce of one with smoothing).
    Raises ValueError: shapes that disagree.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} need labels {tuple(logits.shape[:-1])}, got {tuple(labels.shape)}"
        )
    vocab = logits.shape[-1] * (1 if group is None else group.size) if vocab_size is None else vocab_size
    own = logits if inplace and logits.is_contiguous() else logits.clone(memory_format=torch.contiguous_format)
    return _loss(own, group, labels, vocab, label_smoothing, ignore_index)


@outside_graphs
def _loss(logits: Tensor, group: Group | None, labels: Tensor, vocab: int, smoothing: float, ignore: int) -> Tensor:
    loss: Tensor = _CrossEntropy.apply(logits, labels, group, vocab, smoothing, ignore)
    return loss
