"""a2a: ranks exchange sequence parts for heads, so that each attends with some heads over all their rows (DeepSpeed
Ulysses, arXiv 2309.14509). One all-to-all carries all tensors."""

import torch
from torch import Tensor

from core.parallel_state.collectives import Group, all_to_all


def to_heads(tensors: tuple[Tensor, ...], group: Group) -> list[Tensor]:
    """[b, a, n, d] each, of this rank's n rows -> [b, a/u, u n, d], of all u ranks' rows in rank order."""
    u = group.size
    by_rank = []
    exchanged = []
    first = 0
    for x in tensors:
        b, a, n, d = x.shape
        by_rank.append(x.reshape(b, u, a // u, n, d).movedim(1, 0))
    # [u, b, all heads / u, n, d]
    received = all_to_all(torch.cat(by_rank, 2), group)
    for x in by_rank:
        count = x.shape[2]
        exchanged.append(received[:, :, first : first + count].permute(1, 2, 0, 3, 4).flatten(2, 3))
        first += count
    return exchanged


def from_heads(tensors: tuple[Tensor, ...], group: Group) -> list[Tensor]:
    """The way back: [b, a/u, u n, d] each -> [b, a, n, d]."""
    u = group.size
    by_rank = []
    exchanged = []
    first = 0
    for x in tensors:
        b, heads, rows, d = x.shape
        by_rank.append(x.reshape(b, heads, u, rows // u, d).movedim(2, 0))
    # from rank j the j-th share of the heads
    received = all_to_all(torch.cat(by_rank, 2), group)
    for x in by_rank:
        count = x.shape[2]
        exchanged.append(received[:, :, first : first + count].movedim(0, 1).flatten(1, 2))
        first += count
    return exchanged
