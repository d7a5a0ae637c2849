"""Weights that a rank moves by its own gradient for one forward, and back: SAM (arXiv 2010.01412)."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from tests.states import state

RATE, RADIUS, RANKS = 0.1, 0.1, 2
DOUBLE = {"dtype": torch.float64}


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8, **DOUBLE), nn.Tanh(), nn.Linear(8, 3, **DOUBLE))


def x(step, rank):
    return torch.randn(4, 6, **DOUBLE, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def sharp(model, x, parts, back=True):
    """Gradients where this rank's loss is higher, of the loss of these parts of its batch."""
    weights = list(model.parameters())
    own = torch.autograd.grad(loss_of(model, x), weights)
    before = [w.detach().clone() for w in weights]
    with torch.no_grad():
        for w, g in zip(weights, own, strict=True):
            w.add_(g, alpha=RADIUS)
    for part in x.chunk(parts):
        (loss_of(model, part) / parts).backward()
    if back:
        with torch.no_grad():
            for w, b in zip(weights, before, strict=True):
                w.copy_(b)


def spread(zero, torchs, parts):
    ps, model = state(), net()
    shard = DataParallel(model, ps, zero_stage=zero)
    if torchs:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    else:
        optimizer = ShardedSGD(shard, OptimizerConfig(lr=RATE, momentum=0.0, clip_grad=0.0, weight_decay=0.0))
    for step in range(4):
        sharp(model, x(step, ps.rank), parts)
        optimizer.step()
        optimizer.zero_grad()
    return [w.detach().clone() for w in model.parameters()]


@pytest.mark.parametrize(
    "zero, torchs, parts", [(0, True, 1), (1, True, 2), (1, False, 1), (2, False, 1), (3, True, 1)]
)
def test_the_weights_are_those_of_the_mean_of_the_ranks_gradients(ranks, zero, torchs, parts):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(4):
        for rank in range(RANKS):
            sharp(model, x(step, rank), parts)
        for w in model.parameters():
            w.grad /= RANKS
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(spread, zero, torchs, parts, world=RANKS):
        torch.testing.assert_close(found, [w.detach() for w in model.parameters()], rtol=1e-10, atol=1e-12)


def never_back(where):
    """What the program is told in its third step, of which the optimizer looks at no weights of its own accord."""
    ps, model = state(), net()
    DataParallel(model, ps)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(3):
        sharp(model, x(step, ps.rank), 1, back=step < 2)
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    try:
        if where == "the next forward":
            sharp(model, x(3, ps.rank), 1, back=False)
        else:
            optimizer.step()
    except ValueError as told:
        return str(told)


@pytest.mark.parametrize("where", ["the next forward", "the optimizer's step"])
def test_weights_that_are_not_put_back_are_refused(ranks, where):
    for told in ranks(never_back, where, world=RANKS):
        assert "the weights of rank 1 are not those of rank 0" in told
