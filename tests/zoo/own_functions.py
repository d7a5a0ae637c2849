"""Functions of torch's between a column linear and a row linear: those that draw, and those in no table of ours."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import distributions
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize

from tests.zoo.case import Case
from tests.zoo.own_activations import between, own_head, split_loss, told
from tests.zoo.own_model import Feedforward, train, weights

SCATTER = "`gather_from_tensor_region`, `scatter_to_tensor_region`"
DROPOUT = "a generator per rank, or numbers of all columns that are cut"


class SummedByTorch(Feedforward):
    """The sum of a row linear by hand, by torch's differentiable all-reduce."""

    def __init__(self, place, scale=1.0):
        super().__init__(place)
        self.group, self.scale = place.group, scale

    def forward(self, x):
        y = F.linear(self.between(self.up(x)), self.down.weight) * self.scale
        if self.group is not None:
            y = dist.nn.functional.all_reduce(y, group=self.group.process_group)
        return y + self.down.bias


def statistic(y):
    """Of all columns, which each rank uses in its own."""
    total = y.pow(2).sum(-1, keepdim=True)
    if dist.is_initialized() and y.shape[-1] < 32:
        total = dist.nn.functional.all_reduce(total)
    return y * (total / 32 + 1e-5).rsqrt()


def accuracy_of(largest):
    """A loss of split logits that also counts right predictions."""

    def loss(logits, labels, ps):
        with torch.no_grad():
            (largest(logits) == labels).double().mean()
        return split_loss(logits, labels, ps)

    return own_head(loss)


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
    told(
        "the sum of a row linear by hand through torch.distributed.nn.functional.all_reduce",
        weights(train, feedforward=SummedByTorch),
        "`reduce_from_tensor_region(x, group)`",
        "gets one gradient on all of them",
    ),
    Case("a statistic of all columns through torch.distributed.nn.functional.all_reduce", between(statistic)),
    told(
        "`_, predictions = y.max(-1)` of split logits",
        accuracy_of(lambda y: torch.max(y, -1)[1]),
        "`gather_from_tensor_region(x, group)`",
        "max.dim..indices between",
    ),
    told("`torch.cov` of columns", between(lambda y: y * torch.cov(y.flatten(0, 1).T).trace()), SCATTER, "cov"),
    told("`F.pad` beside the columns", between(lambda y: F.pad(y, (1, 0))[..., 1:] + y), SCATTER, "pad"),
    told(
        "torch's fused observer and quantiser, `FusedMovingAvgObsFakeQuantize`",
        between(lambda y: FusedMovingAvgObsFakeQuantize().float()(y.float()).double()),
        SCATTER,
        "fused_moving_avg_obs_fake_quant",
    ),
    told("`torch.logcumsumexp` over columns", between(lambda y: torch.logcumsumexp(y, -1)), SCATTER, "logcumsumexp"),
]


def _over_sequence(y):
    mixing = torch.eye(y.shape[1], dtype=y.dtype).flip(0)
    return torch.tensordot(y, mixing, dims=([1], [0])).movedim(-1, 1)
