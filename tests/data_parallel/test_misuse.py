"""What is done to a model or a step behind DataParallel's back is told, where it would train wrongly in silence."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelState
from core.pipeline import SingleStage

ALONE = ParallelState.single("cpu")
X = torch.ones(4, 8)


def square(output, x):
    return output.square().sum(), len(x)


def made(frozen=False):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(not frozen)
    shard = DataParallel(model, ALONE)
    return model, shard, ShardedAdamW(shard, OptimizerConfig()), SingleStage(model, ps=ALONE, grad_sync=shard)


def test_a_parameter_unfrozen_later():
    model, _, _, run = made(frozen=True)
    run.step(X, square)
    run.grad_sync.zero_grad()
    model[1].requires_grad_(True)
    with pytest.raises(ValueError, match=r"2 trainable parameters \(1.weight, 1.bias\) are summed by nobody"):
        run.step(X, square)


def test_parameters_replaced():
    model, _, optimizer, _ = made()
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    model(X).sum().backward()
    with pytest.raises(ValueError, match=r"4 trainable parameters .* replaced \(load_state_dict\(assign=True\)\?\)"):
        optimizer.step()


def test_parameters_moved():
    model, _, optimizer, _ = made()
    model.double()
    with pytest.raises(ValueError, match=r"the values of 1.bias and 1 more do not lie in its buffers any more"):
        model(X.double()).sum().backward()
    with pytest.raises(ValueError, match=r"do not lie in its buffers any more \(model.to\(\) or half\(\)"):
        optimizer.step()


def test_a_step_after_one_that_failed():
    model, shard, _, run = made()

    def fails(output, x):
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        run.step(X, fails)
    with pytest.raises(ValueError, match=r"the last step began and did not finish .*; call zero_grad\(\)"):
        run.step(X, square)
    shard.zero_grad()
    run.step(X, square)
    twin = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    twin.load_state_dict(model.state_dict())
    twin(X).square().sum().backward()
    assert all(torch.equal(p.main_grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
