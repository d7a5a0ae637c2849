"""all_gather: keys and values of all ranks are gathered for one layer at a time (Llama 3, arXiv 2407.21783)."""

import torch
from torch import Tensor

from core.context_parallel.rows_attention import Attended, Gradients, RowsOfRing
from core.parallel_state.collectives import (
    BACKWARD_TAG,
    Group,
    reduce_scatter,
    start_all_gather,
)


def forward(
    rows: RowsOfRing, q: Tensor, k: Tensor, v: Tensor, group: Group | None
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp. All-gather of k and v."""
    attended = Attended(rows, q)
    if group is None:
        attended.add(rows.own, k, v)
        return attended.result()
    pending = start_all_gather(torch.stack((k, v))[None], group)
    # beside the gathering, where the backend works by itself
    attended.add(rows.own, k, v)
    of_ranks = pending.wait()  # [cp, 2, b, g, n, d]
    for block in rows.others:
        attended.add(block, of_ranks[block.source, 0], of_ranks[block.source, 1])
    return attended.result()


def backward(
    rows: RowsOfRing,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    group: Group | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. All-gather of k and v, reduce-scatter of their gradients."""
    gradients = Gradients(rows, grad, q, out, logsumexp)
    if group is None:
        dk, dv = gradients.add(rows.own, k, v)
        return gradients.of_queries(), dk, dv
    pending = start_all_gather(torch.stack((k, v))[None], group, tag=BACKWARD_TAG)
    own = gradients.add(rows.own, k, v)
    of_ranks = pending.wait()
    # as large as what was gathered; the zeros are keys that no query of this rank sees
    sums = torch.zeros_like(of_ranks)
    sums[rows.rank, 0], sums[rows.rank, 1] = own
    for block in rows.others:
        of_source = of_ranks[block.source]
        keys = slice(block.keys.start, block.keys.stop)
        dk, dv = gradients.add(block, of_source[0], of_source[1])
        sums[block.source, 0, :, :, keys], sums[block.source, 1, :, :, keys] = dk, dv
    # before the reduce-scatter takes memory of its own
    del of_ranks
    of_own = reduce_scatter(sums, group)[0]
    return gradients.of_queries(), of_own[0], of_own[1]
