"""FlexAttention's functions on a rank's heads: which of them take the number of a head for the model's."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from core.parallel_state.by_hand.split_flex import depends_on_head
from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear
from tests.states import state

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SCORES = {
    "none": (lambda score, b, h, q, k: score, False),
    "causal": (lambda score, b, h, q, k: torch.where(q >= k, score, -torch.inf), False),
    "a cap": (lambda score, b, h, q, k: 20 * torch.tanh(score / 20), False),
    "every other head": (lambda score, b, h, q, k: torch.where(h % 2 == 0, score, score - q + k), False),
    "ALiBi by number": (lambda score, b, h, q, k: score - torch.exp2(-(h + 1.0)) * (q - k), True),
    "ALiBi by a table": (lambda score, b, h, q, k: score - SLOPES[h] * (q - k), True),
    "a table of this rank's": (lambda score, b, h, q, k: score - SLOPES[:2][h] * (q - k), False),
}


@pytest.mark.parametrize("what", SCORES)
def test_a_score_depends_on_the_number_of_a_head(what):
    function, depends = SCORES[what]
    assert depends_on_head("score_mod", function, torch.zeros(1, 2, 4, 4), 2) is depends


def test_a_mask_depends_on_it():
    query = torch.zeros(1, 2, 4, 4)
    assert depends_on_head("mask_mod", lambda b, h, q, k: (h < 2) & (q >= k), query, 2)
    assert not depends_on_head("mask_mod", lambda b, h, q, k: q >= k, query, 2)


class Attention(nn.Module):
    def __init__(self, place, score_mod):
        super().__init__()
        self.qkv = ColumnParallelLinear(16, (3, 16), split_dim=1, place=place)
        self.out = RowParallelLinear(16, 16, place=place)
        self.score_mod = score_mod

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, -1, 4).permute(2, 0, 3, 1, 4)
        return self.out(flex_attention(q, k, v, score_mod=self.score_mod).transpose(1, 2).flatten(2))


def by_own_number(score, b, h, q, k):
    """Of this rank's heads, counted on from those of the rank before."""
    return score - torch.exp2(-(h + 2 * torch.distributed.get_rank() + 1.0)) * (q - k)


def on_the_first_heads(score, b, h, q, k):
    """As before, and only the first rank's scores depend on a head at all."""
    return score - (h + 2 * torch.distributed.get_rank() < 1) * (q - k)


OFFSET = {"ALiBi from this rank's first head": by_own_number, "on the first rank's heads": on_the_first_heads}


def attended(what):
    function = OFFSET[what] if what in OFFSET else SCORES[what][0]
    attention = Attention(Placement.of(state(tp=2), torch.float64), function)
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(3):
            attention(torch.ones(2, 8, 16, dtype=torch.float64))
    assert not [one for one in told if "between ColumnParallelLinear" in str(one.message)]
    return sum("flex_attention's score_mod is given the numbers 0 to 1" in str(one.message) for one in told)


@pytest.mark.parametrize("what", ["causal", "ALiBi by number", "a table of this rank's", *OFFSET])
def test_a_programs_attention_is_told(what, ranks):
    depends = what not in OFFSET and SCORES[what][1]
    assert ranks(attended, what, world=2) == [int(depends)] * 2
