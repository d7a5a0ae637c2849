"""Clipping an executor's gradients: refused as sums over tokens, right once the program has divided them."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import clip_grad_norm_, get_grad_norm
from core.pipeline import SingleStage
from tests.states import state

LIMIT, STEPS = 0.05, 3


def loss(y, part):
    return y.square().sum(), y.numel()


def in_place(p, n):
    p.grad.div_(n)


def another(p, n):
    p.grad = p.grad / n


DIVISIONS = {"in place": in_place, "another tensor": another}


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Tanh(), nn.Linear(4, 4, dtype=torch.float64))


def trained(ps, zero_stage, division):
    model = net()
    shard = DataParallel(model, ps, zero_stage=zero_stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    executor = SingleStage(model, ps=ps, num_microbatches=2, grad_sync=shard)
    found = []
    for seed in range(STEPS):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        result = executor.step(rows[ps.index("dp") :: ps.size("dp")].contiguous(), loss)
        if not seed:
            with pytest.raises(ValueError, match=r"sums over tokens.*divide them first: p\.grad\.div_"):
                clip_grad_norm_(model.parameters(), LIMIT)
        for p in model.parameters():
            DIVISIONS[division](p, result.num_tokens)
        found.append(float(get_grad_norm(model.parameters(), parallel=ps)))
        found.append(float(clip_grad_norm_(model.parameters(), LIMIT, parallel=ps)))
        optimizer.step()
        optimizer.zero_grad()
    return found, [p.detach().clone() for p in model.state_dict().values()]


def of_one_process():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for seed in range(STEPS):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        model(rows).square().mean().backward()
        found += [float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT))] * 2
        optimizer.step()
        optimizer.zero_grad()
    return found, list(model.state_dict().values())


def on_ranks(zero_stage, division):
    return trained(state(), zero_stage, division)


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_divided_sums_are_clipped_as_in_one_process(ranks, zero_stage, division):
    norms, weights = of_one_process()
    for got_norms, got_weights in ranks(on_ranks, zero_stage, division, world=2):
        torch.testing.assert_close(got_norms, norms, rtol=1e-12, atol=0)
        torch.testing.assert_close(got_weights, weights, rtol=1e-12, atol=1e-15)
