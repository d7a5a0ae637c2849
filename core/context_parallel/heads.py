"""a2a: ranks exchange sequence parts for heads, so that each attends with some heads over all their rows (DeepSpeed
Ulysses, arXiv 2309.14509). One all-to-all carries all tensors."""

import torch
from torch import Tensor

from core.parallel_state.collectives import Group, all_to_all


def to_heads(tensors: tuple[Tensor, ...], group: Group | None) -> tuple[Tensor, ...]:
    """[b, a, n, d] each, of this rank's n rows -> [b, a/u, u n, d], of all u ranks' rows in rank order."""
    if group is None:
        return tensors
    u = group.size
    by_rank = [x.unflatten(1, (u, -1)).movedim(1, 0) for x in tensors]  # [u, b, a/u, n, d]
    received = all_to_all(torch.cat(by_rank, 2), group)
    # [u, b, heads, n, d] -> [b, heads, u n, d]
    return tuple(
        part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in received.split([x.shape[2] for x in by_rank], 2)
    )


def from_heads(tensors: tuple[Tensor, ...], group: Group | None) -> tuple[Tensor, ...]:
    """The way back: [b, a/u, u n, d] each -> [b, a, n, d]."""
    if group is None:
        return tensors
    u = group.size
    by_rank = [x.unflatten(2, (u, -1)).movedim(2, 0) for x in tensors]  # [u, b, a/u, n, d]
    received = all_to_all(torch.cat(by_rank, 2), group)
    # rank j sent the j-th share of the heads
    parts = received.split([x.shape[2] for x in by_rank], 2)
    return tuple(part.movedim(0, 1).flatten(1, 2) for part in parts)
