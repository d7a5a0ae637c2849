"""What is done to a model or a step behind DataParallel's back is told, where it would train wrongly in silence."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.dist_checkpointing import load, save
from core.optimizer import OptimizerConfig, ShardedAdamW, sharded_state_dict
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from tests.pool import RankError
from tests.states import state

ALONE = ParallelState.single("cpu")
X = torch.ones(4, 8)


def square(output, x):
    return output.square().sum(), len(x)


def made(frozen=False):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(not frozen)
    shard = DataParallel(model, ALONE)
    return model, shard, ShardedAdamW(shard, OptimizerConfig()), SingleStage(model, ps=ALONE, grad_sync=shard)


def under_fully_shard(first):
    """torch's FSDP2 before our DataParallel, or behind it: what is said, by stage."""
    from torch.distributed.fsdp import fully_shard  # a second of imports

    said = {}
    for stage in (1, 3):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        ps = state()
        try:
            if first:
                fully_shard(model)
            shard = DataParallel(model, ps, zero_stage=stage)
            optimizer = ShardedAdamW(shard, OptimizerConfig())
            if not first:
                fully_shard(model)
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            said[stage] = "nothing"
        except (ValueError, NotImplementedError) as error:
            said[stage] = str(error)
    return said


def test_parameters_that_torch_spreads():
    model = nn.Linear(8, 8)
    model.weight.placements = ()  # as a DTensor's
    with pytest.raises(ValueError, match=r"weight and 0 more of 2 parameters are DTensors, .*; leave that out"):
        DataParallel(model, ALONE)


@pytest.mark.full
@pytest.mark.parametrize("first", [True, False])
def test_torchs_fully_shard_beside_it_is_refused(ranks, first):
    for said in ranks(under_fully_shard, first, world=2):
        if first:
            assert "0.weight and 3 more of 4 parameters are DTensors, which torch's fully_shard" in said[1] == said[3]
        else:
            assert "0.weight and 3 more of 4 parameters are DTensors, which torch's fully_shard" in said[1]
            # freed weights are what FSDP2 cannot take over: its own words, before anything moved
            assert "FSDP does not support non-contiguous parameters" in said[3]


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


def per_sample(zero_stage):
    ps = state()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    DataParallel(model, ps, zero_stage=zero_stage)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.ones(3, 4))
    return found["0.weight"].shape


def test_gradients_per_sample_by_torch_func(ranks):
    for zero_stage in (1, 2):
        assert ranks(per_sample, zero_stage) == [torch.Size([3, 4, 4])] * 2
    with pytest.raises(
        RankError, match=r"inside of a transform of torch.func .* at zero_stage=3: .* use zero_stage=2"
    ):
        ranks(per_sample, 3)


def saved_by_torchs_optimizer(path):
    """Losses after a restart at another stage, and without one."""
    ps = state()

    def made(seed, zero_stage):
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        shard = DataParallel(model, ps, zero_stage=zero_stage)
        return model, shard, torch.optim.AdamW(model.parameters(), lr=0.1)

    def losses(model, optimizer, steps):
        found = []
        for step in steps:
            torch.manual_seed(step)
            loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whole weights of stage 3 are lent
        model, shard, optimizer = made(0, 3)
        losses(model, optimizer, range(2))
        with pytest.raises(ValueError, match="at ZeRO stage 3, where a rank keeps parts, "):
            save({"model": sharded_state_dict(shard), "optimizer": optimizer}, path, ps=ps)
        save({"model": model.state_dict(), "optimizer": optimizer}, path, ps=ps)
        expected = losses(model, optimizer, range(2, 5))
        for zero_stage in (3, 2):
            model, _, optimizer = made(1, zero_stage)
            weights = model.state_dict()
            load({"model": weights, "optimizer": optimizer}, path, ps=ps)
            model.load_state_dict(weights)
            assert losses(model, optimizer, range(2, 5)) == pytest.approx(expected, rel=1e-12)


def test_torchs_optimizer_over_freed_weights_is_saved_with_whole_ones(ranks, tmp_path):
    ranks(saved_by_torchs_optimizer, str(tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    "use, message",
    [
        (lambda model, shard: DataParallel(model), r"DataParallel\(module, ps\): ps is what .*initialize_model_par"),
        (lambda model, shard: shard(X), "stands beside its module and is not called: call the module itself"),
        (lambda model, shard: shard.parameters(), "'parameters': it stands beside its module; use the module's own"),
        (lambda model, shard: shard.state_dict(), "'state_dict': it stands beside its module"),
        (lambda model, shard: shard.register_comm_hook(None, print), "give reduce_dtype=torch.bfloat16"),
        (lambda model, shard: shard.nothing, "has no attribute 'nothing'$"),
        (
            lambda model, shard: ShardedAdamW(model, OptimizerConfig()),
            "takes a DataParallel .*, not Linear: .*zero_st",
        ),
        (lambda model, shard: ShardedAdamW(model.parameters(), lr=1e-3), r"not generator: .*OptimizerConfig\(lr="),
        (lambda model, shard: ShardedAdamW(shard, lr=1e-3), r"takes a DataParallel and a configuration: Sharded"),
    ],
)
def test_the_habits_of_torchs_ddp_and_optimizers_are_answered(use, message):
    model = nn.Linear(8, 4)
    with pytest.raises((TypeError, AttributeError), match=message):
        use(model, DataParallel(model, ALONE))
