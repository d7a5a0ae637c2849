"""Whole sequences, their attention in plain float64 torch, and one rank's rows of them."""

import torch
import torch.nn.functional as F

from core.context_parallel import Exchange, begin_of_rows, context_attention, visible_mask
from core.parallel_state import ContextRows
from tests.states import state


def whole(s, heads=4, groups=2, b=2, d=4, seed=0):
    """q, k, v and the output's gradient, [b, a or g, s, d]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, s, d, generator=generator, dtype=torch.float64) for h in (heads, groups, groups, heads)]


def documents(s, cuts):
    """document_begin [b, s] of one list of cuts per sequence."""
    begin = torch.zeros(len(cuts), s, dtype=torch.int64)
    for row, places in enumerate(cuts):
        for place in sorted(places):
            begin[row, place:] = place
    return begin


def reference(s, cuts=None, window=None, **sizes):
    """out, dq, dk, dv of torch's own attention with a mask of size s x s."""
    q, k, v, grad = whole(s, **sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    begin = documents(s, cuts) if cuts else torch.zeros(q.shape[0], s, dtype=torch.int64)
    if window is not None:
        begin = torch.maximum(begin, torch.arange(s) - window + 1)
    out = F.scaled_dot_product_attention(*leaves, ~visible_mask(begin), enable_gqa=True)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def on_rank(s, kind, ulysses, cuts=None, sizes=None, exchange_of=Exchange):
    """The same on this rank's rows, and the rows."""
    ps = state(cp=torch.distributed.get_world_size(), cp_comm_type=kind, ulysses=ulysses)
    rows = ContextRows.of_state(ps)
    q, k, v, grad = (rows.of(x, 2).contiguous() for x in whole(s, **(sizes or {})))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    begin = begin_of_rows(rows.of(documents(s, cuts), 1), ps) if cuts else None
    out = context_attention(*leaves, exchange_of(ps), documents=begin, scale=q.shape[3] ** -0.5)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)], rows.rows(s)


def error(found, expected, rows):
    """The largest difference of all four, relative."""
    pairs = zip(found, expected, strict=True)
    return max(((a - b[:, :, rows]).abs().max() / b.abs().max()).item() for a, b in pairs)
