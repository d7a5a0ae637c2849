"""Weights that numpy has in the middle of a step of ZeRO stage 3 neither end the run nor change it."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from tests.states import state


def trained(when):
    ps = state()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    DataParallel(module, ps, zero_stage=3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    kept = []

    def read(*call):
        kept.append(float(module[2].weight.detach().numpy().sum()))

    if when == "forward":
        module[2].register_forward_hook(read)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).double()
        loss = module(x).square().mean()
        if when == "between":
            read()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()], kept


@pytest.mark.parametrize("when", ["forward", "between"])
def test_numpy_in_the_middle_of_a_step(ranks, when):
    expected = ranks(trained, "", world=2)
    for (weights, kept), (others, _) in zip(ranks(trained, when, world=2), expected, strict=True):
        assert all(map(torch.equal, weights, others))
        # of three steps, each its own
        assert len(set(kept)) == 3


def differentiated():
    """By torch.func, of parameters that were not detached."""
    module = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 5)).double()
    DataParallel(module, state(), zero_stage=3)
    x = torch.ones(2, 6).double()

    def loss(weights):
        return torch.func.functional_call(module, weights, (x,)).sum()

    with pytest.raises(ValueError, match="at zero_stage=3"):
        torch.func.grad(loss)(dict(module.named_parameters()))


def test_torch_func_is_refused(ranks):
    ranks(differentiated, world=2)
