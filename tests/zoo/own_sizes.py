"""Scales, groups and windows of a rank's columns: by their number, by one in the text, beside each other."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from core.parallel_state.layout import Layout, set_layout
from tests.zoo.case import Case
from tests.zoo.own_activations import GATHER, REDUCED, between, grouped, told
from tests.zoo.own_model import FFN, Feedforward, train, weights

OF_ALL = "the size of all, `y.shape[-1] * place.tp`"


def maxout(y):
    return y.unflatten(-1, (-1, 2)).amax(-1, keepdim=True).expand(*y.shape[:-1], -1, 2).flatten(2)


def groups(y, count):
    z = y.unflatten(-1, (count, -1))
    return (z / (z.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(2)


def four_groups(y):
    z = y.unflatten(-1, (4, -1))
    return (z / (z.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(2)


class GroupNormed(Feedforward):
    """RWKV's `ln_x`, RetNet's, a Conformer's: a norm of each head's columns."""

    def __init__(self, place):
        super().__init__(place)
        self.n_head = 4
        self.norm = nn.GroupNorm(self.n_head, FFN // place.tp, affine=False)

    def forward(self, x):
        y = F.gelu(self.up(x))
        return self.down(self.norm(y.flatten(0, 1)).view(y.shape))


class OfItsHeads(GroupNormed):
    def __init__(self, place):
        super().__init__(place)
        self.norm = nn.GroupNorm(self.n_head // place.tp, FFN // place.tp, affine=False)


class ByText(GroupNormed):
    def __init__(self, place):
        super().__init__(place)
        self.n_head = 1
        self.norm = nn.GroupNorm(4, FFN // place.tp, affine=False)


class BatchNormed(GroupNormed):
    """A Conformer's convolution part."""

    def __init__(self, place):
        super().__init__(place)
        self.norm = nn.BatchNorm1d(FFN // place.tp)
        for parameter in self.norm.parameters():
            set_layout(parameter, Layout((FFN,), {"tp": 0}))


CASES = [
    told(
        "`nn.GroupNorm(n_head, width // tp)`",
        weights(train, feedforward=GroupNormed),
        "`n_head // tp` groups",
        r"4 groups \(n_head\) on each of 2 ranks",
    ),
    told(
        "`nn.GroupNorm(4, width // tp)`",
        weights(train, feedforward=ByText),
        "`4 // place.tp`",
        "4 groups, a number in the program's text",
    ),
    Case("`nn.GroupNorm(n_head // tp, width // tp)`", weights(train, feedforward=OfItsHeads)),
    Case("`nn.BatchNorm1d(width // tp)`, its weights with a layout", weights(train, feedforward=BatchNormed)),
    told(
        "a spectrum over the width, `torch.fft.fft(y)`", between(lambda y: torch.fft.fft(y).real / 9), GATHER, REDUCED
    ),
    told(
        "`F.local_response_norm` over the width",
        between(lambda y: F.local_response_norm(y.transpose(1, 2), 3).transpose(1, 2)),
        GATHER,
        REDUCED,
    ),
    told(
        "a scale by the width, `y / y.shape[-1] ** 0.5`",
        between(lambda y: y / y.shape[-1] ** 0.5),
        OF_ALL,
        "place.tp",
    ),
    told("`10 * y / math.sqrt(y.size(-1))`", between(lambda y: 10 * y / math.sqrt(y.size(-1))), OF_ALL, "place.tp"),
    told("a scale by all elements, `y / y.numel()`", between(lambda y: 99 * y / y.numel()), OF_ALL, "place.tp"),
    told(
        "a scale by heads, `1 / q.shape[2]`",
        between(lambda y: (lambda q: q / q.shape[2])(y.unflatten(-1, (-1, 2))).flatten(2)),
        OF_ALL,
        "place.tp",
    ),
    Case("a scale by the width of all", grouped(lambda y, place: y / (y.shape[-1] * place.tp) ** 0.5)),
    told(
        "norms of 4 groups, a number in the text", between(four_groups), "`4 // place.tp`", "4 heads, a number in the"
    ),
    told(
        "`F.group_norm(y, 4)`, a number in the text",
        between(lambda y: F.group_norm(y.transpose(1, 2), 4).transpose(1, 2)),
        "`4 // place.tp`",
        "4 groups, a number in the program's text",
    ),
    Case("norms of `4 // place.tp` groups", grouped(lambda y, place: groups(y, 4 // place.tp))),
    Case("maxout by windows beside each other", between(maxout)),
    Case("maxout by `F.max_pool1d`", between(lambda y: F.max_pool1d(y, 2).repeat_interleave(2, -1))),
    Case("maxout by `unfold`", between(lambda y: y.unfold(-1, 2, 2).amax(-1).repeat_interleave(2, -1))),
    told(
        "windows that overlap, `F.avg_pool1d(y, 3, 1, 1)`",
        between(lambda y: F.avg_pool1d(y, 3, 1, 1)),
        GATHER,
        REDUCED,
    ),
    Case(
        "even columns times odd ones",
        between(lambda y: torch.stack([y[..., ::2] * y[..., 1::2]] * 2, -1).flatten(-2)),
    ),
]
