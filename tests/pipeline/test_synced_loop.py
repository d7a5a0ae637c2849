"""Norms and sums by hand over a pipeline whose gradients lie in buckets are of one rank's stages: told."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from core.pipeline import Pipeline
from tests.states import state

STEPS = 3


def batch(step):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def loss(output, microbatch):
    return output.square().sum(), output.numel()


def norms(model):
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm()


def squares(model):
    return sum(p.grad.pow(2).sum().item() for p in model.parameters()) ** 0.5


def total_norm(model):
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])


def weights_norm(model):
    return sum(p.detach().norm() ** 2 for p in model.parameters()) ** 0.5


def nothing(model):
    return None


def signs(model):
    for p in model.parameters():
        p.grad.sign_()


def one_norm(model):
    return next(model.parameters()).grad.norm().item()


def own_norms(model):
    for p in model.parameters():
        p.grad.div_(p.grad.norm() + 1)


def said_of(look, zero_stage):
    """What is told while a loop looks at gradients before each update; nobody listens to parameters in the end."""
    ps = state(pp=2)
    torch.manual_seed(ps.index("pp"))
    model = nn.Linear(4, 4)
    shard = DataParallel(model, ps, zero_stage=zero_stage)
    optimizer = ShardedSGD(shard, OptimizerConfig(lr=0.01, clip_grad=0.0))
    pipeline = Pipeline([model], ps=ps, num_microbatches=2, grad_sync=shard)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(STEPS):
            result = pipeline.step(batch(step), loss)
            look(model)
            optimizer.step(num_tokens=result.num_tokens)
            optimizer.zero_grad()
        pipeline.evaluate(batch(0), loss)
    pipeline.close()
    assert not any(hasattr(type(p), "reports_to") for p in model.parameters())
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("world, zero_stage", [(2, 0), (2, 1), (4, 1), (4, 2), (4, 3)])
@pytest.mark.parametrize("look", [norms, squares, total_norm, weights_norm])
def test_numbers_of_one_ranks_stages_are_told_once(ranks, look, world, zero_stage):
    expected = "of several weights is" if look is weights_norm else "gradients were reduced by hand"
    if look is weights_norm and zero_stage == 3:
        expected = "A norm or a sum of several weights is"
    for told in ranks(said_of, look, zero_stage, world=world):
        assert len(told) == 1 and expected in told[0] and "of this rank's stages" in told[0], told


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("look", [nothing, signs, one_norm, own_norms])
def test_right_loops_hear_nothing(ranks, look, zero_stage):
    assert not any(ranks(said_of, look, zero_stage, world=4))


def lbfgs(zero_stage):
    ps = state(pp=2)
    model = nn.Linear(4, 4)
    shard = DataParallel(model, ps, zero_stage=zero_stage)
    optimizer = torch.optim.LBFGS(model.parameters())
    pipeline = Pipeline([model], ps=ps, num_microbatches=2, grad_sync=shard)
    pipeline.step(batch(0), loss)
    with pytest.raises(ValueError, match="sees those of 1 of 2 pipeline ranks"):
        optimizer.step(lambda: torch.zeros(()))
    pipeline.close()


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_an_optimizer_over_all_parameters_is_refused(ranks, zero_stage):
    ranks(lbfgs, zero_stage, world=4)


def penalised(zero_stage, schedule, factor):
    """Weights of this rank's stage after a step; factor: of the penalty `p.square().sum() / 2`, 0 for none."""
    ps = state(pp=2)
    torch.manual_seed(ps.index("pp"))
    model = nn.Linear(4, 4)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    shard = DataParallel(model, ps, zero_stage=zero_stage)
    config = OptimizerConfig(lr=0.5, clip_grad=0.0, weight_decay=0.0)
    optimizer = ShardedSGD(shard, config)
    pipeline = Pipeline([model], ps=ps, schedule=schedule, num_microbatches=2, grad_sync=shard)
    # what the step divides by is known before: outputs of all replicas, which take the same batch here
    num_tokens = batch(0).numel() * ps.size("dp-cp")
    if factor:
        penalty = sum(p.square().sum() / 2 for p in model.parameters())
        (factor * num_tokens / ps.size("dp-cp") * penalty).backward()
    result = pipeline.step(batch(0), loss)
    assert float(result.num_tokens) == num_tokens
    optimizer.step(num_tokens=result.num_tokens)
    after = torch.cat([p.detach().flatten() for p in model.state_dict().values()])
    pipeline.close()
    return before, after


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("zero_stage, world", [(0, 2), (0, 4), (1, 4), (2, 4), (3, 4)])
def test_a_penalty_of_own_stages_counts_what_the_docs_say(ranks, zero_stage, world, schedule):
    plain = ranks(penalised, zero_stage, schedule, 0.0, world=world)
    found = ranks(penalised, zero_stage, schedule, 0.1, world=world)
    for (before, after), (_, expected) in zip(found, plain, strict=True):
        torch.testing.assert_close(after, expected - 0.5 * 0.1 * before, rtol=0, atol=1e-12)
