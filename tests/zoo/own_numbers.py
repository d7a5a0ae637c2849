"""Biases, masks and numbers of columns or heads in a module of one's own, where each rank has its columns."""

import torch
from torch.nn import functional as F

from core.tensor_parallel import vocab_parallel_cross_entropy
from tests.zoo.case import Case
from tests.zoo.own_activations import between, grouped, own_head, told
from tests.zoo.own_model import FFN, HEADS, VOCAB, Attention, H, train, weights

REMEDY, SAYS = "numbers for all, and `whole.chunk(place.tp, dim)[place.rank]`", "same on all 2 ranks.*place.rank"
PRIOR = torch.linspace(0, 1, max(FFN, VOCAB))


def slopes(heads):
    """ALiBi's: arXiv 2108.12409, section 3."""
    return torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])


class Alibi(Attention):
    """of_rank: this rank's slopes, by the heads it has; in_scores: added to them by hand."""

    def __init__(self, place, of_rank, in_scores=False):
        super().__init__(place)
        self.place, self.of_rank, self.in_scores = place, of_rank, in_scores

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, -1, H // HEADS).permute(2, 0, 3, 1, 4)
        place = torch.arange(s)
        bias = self.of_rank(q.shape[1], self.place)[:, None, None] * (place[None] - place[:, None])
        bias = bias.masked_fill(place[None] > place[:, None], float("-inf"))
        if self.in_scores:
            y = (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).flatten(2))


def alibi(of_rank, **how):
    return weights(train, attention=lambda place: Alibi(place, of_rank, **how))


def own_slopes(heads, place):
    return slopes(heads)


def cut_slopes(heads, place):
    return slopes(HEADS).chunk(place.tp)[place.rank]


def numbers(y, place):
    """The true numbers of this rank's columns."""
    return place.rank * y.shape[-1] + torch.arange(y.shape[-1])


def blanked(y, columns):
    y = y.clone()
    y[..., columns] = 0.0
    return y


def own_columns(y, place):
    """Those of columns 3 and 7 that this rank has, in its numbers."""
    first = place.rank * y.shape[-1]
    return blanked(y, [column - first for column in (3, 7) if first <= column < first + y.shape[-1]])


def signs(y):
    return y * torch.tensor([1.0, -1.0]).repeat(y.shape[-1] // 2)


def loss_with(prior):
    def loss(logits, labels, ps):
        return vocab_parallel_cross_entropy(logits + prior(logits, ps), labels, ps.group("tp")).mean()

    return loss


def cut_prior(logits, ps):
    n, group = logits.shape[-1], ps.group("tp")
    return PRIOR[:VOCAB].narrow(0, n * (group.rank if group is not None else 0), n)


CASES = [
    told(
        "a bias by this rank's columns, `y + prior[: y.shape[-1]]`",
        between(lambda y: y + PRIOR[: y.shape[-1]]),
        REMEDY,
        SAYS,
    ),
    Case(
        "a bias of all columns, `prior.chunk(place.tp)[place.rank]`",
        grouped(lambda y, place: y + PRIOR[:FFN].chunk(place.tp)[place.rank]),
    ),
    told("columns in a list, `y[..., [3, 7]] = 0`", between(lambda y: blanked(y, [3, 7])), REMEDY, SAYS),
    told(
        "columns in a tensor, `y[..., torch.tensor([3, 7])] = 0`",
        between(lambda y: blanked(y, torch.tensor([3, 7]))),
        REMEDY,
        SAYS,
    ),
    Case("columns in a list, those that this rank has", grouped(own_columns)),
    told(
        "`y.index_fill(-1, torch.tensor([3, 7]), 0)`",
        between(lambda y: y.index_fill(-1, torch.tensor([3, 7]), 0.0)),
        REMEDY,
        SAYS,
    ),
    told(
        "`torch.where(torch.arange(y.shape[-1]) < 8, 0, y)`",
        between(lambda y: torch.where(torch.arange(y.shape[-1]) < 8, 0.0, y)),
        REMEDY,
        SAYS,
    ),
    Case(
        "`torch.where` by the columns' true numbers",
        grouped(lambda y, place: torch.where(numbers(y, place) < 8, 0.0, y)),
    ),
    told(
        "`y.masked_fill(torch.arange(y.shape[-1]) < 8, 0)`",
        between(lambda y: y.masked_fill(torch.arange(y.shape[-1]) < 8, 0.0)),
        REMEDY,
        SAYS,
    ),
    told(
        "`y[..., torch.arange(y.shape[-1]) < 8] = 0`",
        between(lambda y: blanked(y, torch.arange(y.shape[-1]) < 8)),
        REMEDY,
        SAYS,
    ),
    Case("signs that alternate from column to column", between(signs)),
    Case("an equal scale in a tensor of columns", between(lambda y: y * torch.full((y.shape[-1],), 0.5))),
    told("ALiBi, slopes of `q.shape[1]` heads in `attn_mask`", alibi(own_slopes), REMEDY, SAYS),
    told("ALiBi, slopes of `q.shape[1]` heads, added to scores", alibi(own_slopes, in_scores=True), REMEDY, SAYS),
    Case("ALiBi, slopes of all heads, cut, in `attn_mask`", alibi(cut_slopes)),
    Case("ALiBi, slopes of all heads, cut, added to scores", alibi(cut_slopes, in_scores=True)),
    told(
        "a prior by this rank's columns on a head split by columns",
        own_head(loss_with(lambda logits, ps: PRIOR[: logits.shape[-1]])),
        REMEDY,
        SAYS,
    ),
    Case("a prior of all columns, cut, on a head split by columns", own_head(loss_with(cut_prior))),
]
