"""Masks by head that are brought to the shape of the scores before they are used."""

import warnings

import pytest
import torch
from torch import nn

from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear
from tests.states import state


class Windows(nn.Module):
    """Head n sees n + 2 tokens, n counted from the first head of all, or of this rank."""

    def __init__(self, place, counts_all):
        super().__init__()
        self.qkv = ColumnParallelLinear(16, (3, 16), split_dim=1, place=place)
        self.out = RowParallelLinear(16, 16, place=place)
        self.first = 2 * place.rank if counts_all else 0

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, -1, 4).permute(2, 0, 3, 1, 4)
        apart = torch.arange(t)[:, None] - torch.arange(t)
        heads = self.first + torch.arange(q.shape[1])
        keep = (apart >= 0) & (apart <= 1 + heads.view(-1, 1, 1))
        scores = (q @ k.mT / 2).clone()
        scores[~keep.expand_as(scores)] = -torch.inf
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def said(counts_all):
    place = Placement.of(state(tp=2))
    module = Windows(place, counts_all)
    dtype = module.qkv.weight.dtype
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(4):
            x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step), dtype=dtype)
            module(x).square().mean().backward()
    return [str(w.message) for w in found if "expand_as" in str(w.message)]


@pytest.mark.parametrize("counts_all", [False, True])
def test_a_mask_of_a_rank_s_own_heads_through_expand_as(ranks, counts_all):
    for messages in ranks(said, counts_all, world=2):
        assert len(messages) == (not counts_all)
