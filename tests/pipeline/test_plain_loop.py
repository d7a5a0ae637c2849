"""What a plain loop around a pipeline gets wrong is told before the next step."""

import copy
import json
import pickle
import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel, DistributedDataParallel
from core.optimizer import OptimizerConfig, ShardedSGD, clip_grad_norm_, get_grad_norm
from core.pipeline import Pipeline, PipelineError
from tests.pool import Pool
from tests.states import state


def stages(ps):
    torch.manual_seed(1)
    return [nn.Linear(4, 4) for _ in range(2)][ps.index("pp")]


def loss(y, part):
    return y.square().sum(), 1 / 2  # of 2 microbatches: the loops below mean the sum


def batch(step=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def clipped(clip, steps, refused, idle=False):
    """idle: a parameter, the smallest, has a gradient of zeros, of which no factor can be told."""
    ps = state(pp=2)
    model = stages(ps)
    if idle:
        model.idle = nn.Parameter(torch.ones(1))
        model.register_forward_hook(lambda module, given, output: output + 0 * module.idle)
    pipeline = Pipeline([model], ps=ps, num_microbatches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    norms = []
    for step in range(steps):
        if step == refused:
            with pytest.raises(PipelineError, match=r"scaled by 0\.\d+ on one rank and by 0\.\d+ on another"):
                pipeline.step(batch(step), loss)
            return norms
        pipeline.step(batch(step), loss)
        norms.append(float(clip(model, ps)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def torchs(model, ps):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def ours(model, ps):
    return clip_grad_norm_(model, 0.1, parallel=ps)


def not_at_all(model, ps):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)


@pytest.mark.parametrize("idle", [False, True])
def test_a_norm_of_one_stage_is_refused_before_the_second_step(idle):
    pool = Pool(2)  # a failed step leaves its groups
    try:
        first, second = pool(clipped, torchs, 5, 1, idle)
    finally:
        pool.close()
    assert first != second


def test_the_norm_of_the_model_is_one_processs(ranks):
    first, second = ranks(clipped, ours, 5, None)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)  # as in the pool
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.set_default_dtype(torch.float32)
    optimizer, want = torch.optim.SGD(whole.parameters(), lr=0.01), []
    for step in range(5):
        whole(batch(step)).square().sum().backward()
        want.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    assert first == second == pytest.approx(want, rel=1e-10)


def test_no_clipping_is_nobodys_concern(ranks):
    ranks(clipped, not_at_all, 6, None)


def over_all_ranks():
    ps = state(pp=2)
    with pytest.raises(ValueError, match=r"averages over ranks \[0, 1\], the replicas of this stage are "):
        Pipeline([nn.parallel.DistributedDataParallel(stages(ps))], ps=ps)


def over_the_replicas():
    ps = state(pp=2)
    plain, model = stages(ps), DistributedDataParallel(stages(ps), parallel=ps)
    for one in (plain, model):
        Pipeline([one], ps=ps, num_microbatches=2).step(batch(), loss)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-12)


def test_ddp_over_other_stages_is_refused(ranks):
    ranks(over_all_ranks)


def test_ddp_over_the_replicas_is_right(ranks):
    ranks(over_the_replicas)


def beside_another_loop():
    """A sharded optimizer steps elsewhere between a pipeline's step and its optimizer's."""
    ps = state(pp=2)
    model, other = stages(ps), nn.Linear(3, 3)
    pipeline = Pipeline([model], ps=ps, num_microbatches=2)
    shard = DataParallel(other, ps, zero_stage=3)
    sharded = ShardedSGD(shard, OptimizerConfig(lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        pipeline.step(batch(step), loss)
        other(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        sharded.step()
        sharded.zero_grad()
        clip_grad_norm_(model, 0.1, parallel=ps)
        optimizer.step()
        optimizer.zero_grad()


def test_another_models_optimizer_is_not_looked_at(ranks):
    ranks(beside_another_loop)


def updated_by_hand(clipped_by):
    """SGD without an optimizer: what is told of it in three steps."""
    ps = state(pp=2)
    model = stages(ps)
    pipeline = Pipeline([model], ps=ps, num_microbatches=2)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(3):
            pipeline.step(batch(step), loss)
            factor = clipped_by(model, ps)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * factor * p.grad
                    p.grad = None
    pipeline.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return [str(w.message) for w in caught]


def own_norm(model, ps):
    """As the forums have it."""
    return 0.1 / sum(p.grad.detach().data.norm(2).item() ** 2 for p in model.parameters()) ** 0.5


def flat_norm(model, ps):
    return 0.1 / torch.cat([p.grad.flatten() for p in model.parameters()]).square().sum().sqrt()


def models_norm(model, ps):
    return 0.1 / get_grad_norm(model, parallel=ps)


def no_norm(model, ps):
    return 1.0


@pytest.mark.parametrize("norm", [own_norm, flat_norm])
def test_a_stages_norm_by_hand_is_told_before_it_is_used_twice(ranks, norm):
    for told in ranks(updated_by_hand, norm):
        assert len(told) == 1 and "core.optimizer.get_grad_norm(parameters) is the model's" in told[0]


def given(different):
    """What is told of batches that differ between the ranks of a pipeline."""
    ps = state(pp=2)
    pipeline = Pipeline([stages(ps)], ps=ps, num_microbatches=2)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(3):
            rows = {"input": batch(10 * ps.rank * different + step)}
            rows["mine"] = torch.ones(8, 1 + ps.rank)  # of a shape of its own
            pipeline.step(rows if different or ps.rank == 0 else None, lambda y, part: (y.square().sum(), len(y)))
    return [str(w.message) for w in caught]


def test_batches_of_the_ranks_of_a_pipeline_that_differ_are_told(ranks):
    assert ranks(given, False) == [[], []]
    for told in ranks(given, True):
        assert len(told) == 1 and "the batch['input'] of rank 0 is not that of rank 1" in told[0]


def penalized(of_weights, step_after):
    """What is told of a penalty in loss_fn; or its own backward, which is right."""
    ps = state(pp=2)
    model = stages(ps)
    pipeline = Pipeline([model], ps=ps, num_microbatches=2)

    def with_penalty(y, part):
        return y.square().sum() + (0.1 * sum(p.square().sum() for p in model.parameters()) if of_weights else 0), len(
            y
        )

    with warnings.catch_warnings(record=True, action="always") as caught:
        pipeline.step(batch(), with_penalty)
        if step_after:
            sum(0.1 * p.square().sum() for p in model.parameters()).backward()
            torch.manual_seed(1)
            whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            (whole(batch()).square().sum() + 0.1 * sum(p.square().sum() for p in whole.parameters())).backward()
            for p, q in zip(model.parameters(), whole[ps.index("pp")].parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)
    return [str(w.message) for w in caught]


def test_a_penalty_in_the_loss_of_the_last_stage_is_told(ranks):
    first, last = ranks(penalized, True, False)
    assert first == [] and len(last) == 1 and "loss_fn takes norms or sums of weights" in last[0]
    assert ranks(penalized, False, True) == [[], []]


def changed_by(change):
    """What is not a norm of one stage's is let be; weights are those of one process."""
    ps = state(pp=2)
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = stages(ps)
    pipeline = Pipeline([model], ps=ps, num_microbatches=2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, whole)]
    for step in range(6):
        pipeline.step(batch(step), loss)
        whole(batch(step)).square().sum().backward()
        for m, optimizer in zip((model, whole), optimizers, strict=True):
            change(m)
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), whole[ps.index("pp")].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def by_value(model):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)


def signs(model):
    for p in model.parameters():
        p.grad.sign_()


def coupled_decay(model):
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.3)


def each_its_own(model):
    for p in model.parameters():
        torch.nn.utils.clip_grad_norm_([p], 0.1)


@pytest.mark.parametrize("change", [by_value, signs, coupled_decay])
def test_changes_that_are_no_norm_are_right(ranks, change):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranks(changed_by, change)


def test_a_norm_per_parameter_is_no_refusal(ranks):
    ranks(changed_by, each_its_own)


@pytest.mark.parametrize("norm", [models_norm, no_norm])
def test_other_updates_by_hand_are_nobodys_concern(ranks, norm):
    assert ranks(updated_by_hand, norm) == [[], []]


def global_sums(ps, model, optimizer):
    """A loop that clips weights by the norm of all of them, which it takes for the model's."""
    pipeline = Pipeline([model], ps=ps, num_microbatches=2)
    for step in range(3):
        pipeline.step(batch(step), loss)
        optimizer.step()
        optimizer.zero_grad()
        norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm()
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), min(1.0, 0.5 / norm.item()))


def joined_weights():
    ps = state(pp=2)
    model = stages(ps)
    with pytest.warns(UserWarning, match="norm by hand of several weights is of this rank's stages"):
        global_sums(ps, model, torch.optim.SGD(model.parameters(), lr=0.01))


def test_a_norm_of_several_weights_is_told(ranks):
    ranks(joined_weights, world=2)


def lbfgs():
    ps = state(pp=2)
    model = stages(ps)
    optimizer = torch.optim.LBFGS(model.parameters())
    pipeline = Pipeline([model], ps=ps, num_microbatches=2)
    pipeline.step(batch(), loss)
    of_another_model = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    of_another_model.step(lambda: torch.zeros(()))  # is nobody's concern
    with pytest.raises(ValueError, match="sees those of 1 of 2 pipeline ranks"):
        optimizer.step(lambda: torch.zeros(()))


def test_an_optimizer_over_all_parameters_is_refused(ranks):
    ranks(lbfgs, world=2)


def said_of(what, before):
    """What is told of a look at the weights after the third step, and before the first one, too."""
    look = TOGETHER.get(what, one_by_one)
    ps = state(pp=2)
    model = stages(ps)
    with warnings.catch_warnings(record=True, action="always") as caught:
        pipeline = Pipeline([model], ps=ps, num_microbatches=2)
        if before:
            look(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(3):
            pipeline.step(batch(step), loss)
            optimizer.step()
            optimizer.zero_grad()
        look(model)
        pipeline.step(batch(3), loss)
        copied = copy.deepcopy(model)
    pipeline.close()
    assert all(type(p) is nn.Parameter for p in (*model.parameters(), *copied.parameters()))
    return [str(w.message) for w in caught]


TOGETHER = {
    "count": lambda model: sum(p.numel() for p in model.parameters()),
    "norm": lambda model: sum(p.detach().norm() ** 2 for p in model.parameters()) ** 0.5,
    "norm in numbers": lambda model: sum(p.norm().item() ** 2 for p in model.parameters()) ** 0.5,
    "largest": lambda model: max(p.detach().abs().max() for p in model.parameters()),
    "largest in numbers": lambda model: max(p.abs().max().item() for p in model.parameters()),
    "stacked": lambda model: torch.stack([p.detach().abs().amax() for p in model.parameters()]).max(),
    "ranked": lambda model: sorted(model.parameters(), key=lambda p: p.norm().item()),
    "quantile": lambda model: torch.cat([p.detach().flatten() for p in model.parameters()]).kthvalue(3),
}


def one_by_one(model):
    """What is right on every stage: norms, counts and ratios of one weight each."""
    log = {name: (p.norm().item(), p.numel(), float(p.detach().abs().max())) for name, p in model.named_parameters()}
    ratios = [p.norm() / p.grad.norm() for p in list(model.parameters())[:1] if p.grad is not None]
    widths = sorted(model.parameters(), key=lambda p: p.numel())
    log_bytes = json.dumps({name: values[1] * 8 for name, values in log.items()})
    assert all(type(pickle.loads(pickle.dumps(values[1]))) is int for values in log.values())
    return log_bytes, ratios, widths


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("what", TOGETHER)
def test_numbers_of_several_weights_together_are_told_once(ranks, what, before):
    for told in ranks(said_of, what, before):
        assert len(told) == 1 and "by hand of several weights is of this rank's stages" in told[0], told


def test_numbers_of_one_weight_are_nobodys_concern(ranks):
    assert ranks(said_of, "one by one", True) == [[], []]


def skipping(who, when, frozen=False):
    """What is told in eight steps of a loop that leaves the optimizer's out on rank `who` at step `when`."""
    ps = state(pp=2)
    model = stages(ps)
    if frozen and ps.rank == 0:
        model.requires_grad_(False)
    pipeline = Pipeline([model], ps=ps, num_microbatches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(8):
            pipeline.step(batch(step), loss)
            if step % 2 and not (step == when and ps.rank in who):  # two steps of the pipeline, one of the optimizer
                optimizer.step()
                optimizer.zero_grad()
    return [str(w.message) for w in caught]


def test_a_step_skipped_on_one_stage_is_told_in_the_next(ranks):
    for told in ranks(skipping, [1], 5):
        assert len(told) == 1 and told[0].startswith("step 7: ") and "1 of 2 now" in told[0]


@pytest.mark.parametrize("who, frozen", [([0, 1], False), ([], True)])
def test_a_step_skipped_on_all_stages_or_never_is_right(ranks, who, frozen):
    assert ranks(skipping, who, 5, frozen) == [[], []]
