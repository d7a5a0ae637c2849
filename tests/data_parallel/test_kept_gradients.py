"""Gradients kept past `zero_grad` or assigned to `.data`, graphs of before a step: right, or refused as in torch."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from tests.states import state

PLAIN = OptimizerConfig(lr=0.1, clip_grad=0.0, weight_decay=0.0)
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def loss(model, k=1):
    return model(X * k).square().sum()


def kept(zero):
    model = build()
    optimizer = ShardedSGD(DataParallel(model, state(), zero_stage=zero), PLAIN)
    parameters = list(model.parameters())
    loss(model).backward()
    handles, copies = [p.grad for p in parameters], [p.grad.clone() for p in parameters]
    detached = parameters[0].grad.detach()
    optimizer.zero_grad()
    loss(model, 2).backward()
    for old in (handles[0], detached):
        with pytest.raises(RuntimeError, match=r"of 0.weight was kept past zero_grad.* keep p.grad.clone"):
            parameters[0].grad.add_(old)
    plain = build()
    (loss(plain) + loss(plain, 2)).backward()
    for p, copy, want in zip(parameters, copies, plain.parameters(), strict=True):
        p.grad.add_(copy)
        assert torch.allclose(p.grad.clone(), want.grad, rtol=1e-12)
        p.grad.data = p.grad.data * 0.5
        assert torch.allclose(p.grad.clone(), want.grad * 0.5, rtol=1e-12)
        assert (p.grad.numpy() == p.grad.clone().numpy()).all()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_those_of_their_step(ranks, zero):
    ranks(kept, zero)


def older_graph(zero):
    model = build()
    optimizer = ShardedSGD(DataParallel(model, state(), zero_stage=zero), PLAIN)
    first, second = loss(model), loss(model, 2)
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_graph_of_before_a_step_is_refused_as_in_torch(ranks, zero):
    ranks(older_graph, zero)


def sums_of_an_executor():
    """`step()` without num_tokens, as in one process: gradients are what `p.grad` shows."""
    found = []
    for ps in (state(), ParallelState.single("cpu")):
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        shard = DataParallel(model, ps, zero_stage=1)
        optimizer = ShardedSGD(shard, PLAIN)
        rows = torch.arange(12.0, dtype=torch.float64).view(4, 3)
        mine = rows if ps.world is None else rows.chunk(2)[ps.rank]
        executor = SingleStage(model, ps=ps, num_microbatches=2, grad_sync=shard)
        executor.step({"input": mine}, lambda y, part: (y.square().sum() * 1e-3, len(y)))
        with pytest.warns(UserWarning, match="over 4 tokens"):
            optimizer.step()
        found.append(model.weight.detach().clone())
    torch.testing.assert_close(*found)


def test_an_executor_s_sums_are_not_divided_where_nobody_says(ranks):
    ranks(sums_of_an_executor, world=2)
