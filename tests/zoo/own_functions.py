"""Functions of torch's between a column linear and a row linear: those that draw, and those in no table of ours."""

import torch
import torch.nn.functional as F
from torch import distributions

from tests.zoo.case import Case
from tests.zoo.own_activations import between, told

SCATTER = "`gather_from_tensor_region`, `scatter_to_tensor_region`"
DROPOUT = "a generator per rank, or numbers of all columns that are cut"


def drawn(what, draw):
    return told(what, between(lambda y: y + 0.1 * y.detach() * draw(y)), DROPOUT, "draw the same")


CASES = [
    drawn("`torch.poisson` of columns", lambda y: torch.poisson(torch.full_like(y, 2.0))),
    drawn("`torch.binomial` of columns", lambda y: torch.binomial(torch.full_like(y, 4.0), torch.full_like(y, 0.5))),
    drawn("`Gamma(...).rsample()`", lambda y: distributions.Gamma(torch.full_like(y, 2.0), 1.0).rsample()),
    drawn("`tensor.random_()` of columns", lambda y: y.detach().clone().random_(0, 9)),
    Case("`y.repeat_interleave(2, 0)[::2]`", between(lambda y: y.repeat_interleave(2, 0)[::2])),
    Case("`torch.stack((y, -y)).sum(0) + y`", between(lambda y: torch.stack((y, -y)).sum(0) + y)),
    Case("`torch.cummax` along the sequence", between(lambda y: y + torch.cummax(y, 1).values)),
    Case("`torch.tensordot` with a matrix over the sequence", between(lambda y: y + _over_sequence(y))),
    told("`torch.cov` of columns", between(lambda y: y * torch.cov(y.flatten(0, 1).T).trace()), SCATTER, "cov"),
    told("`F.pad` beside the columns", between(lambda y: F.pad(y, (1, 0))[..., 1:] + y), SCATTER, "pad"),
    told("`torch.logcumsumexp` over columns", between(lambda y: torch.logcumsumexp(y, -1)), SCATTER, "logcumsumexp"),
]


def _over_sequence(y):
    mixing = torch.eye(y.shape[1], dtype=y.dtype).flip(0)
    return torch.tensordot(y, mixing, dims=([1], [0])).movedim(-1, 1)
