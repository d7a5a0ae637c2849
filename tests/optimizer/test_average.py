"""The average of the weights beside a plain loop and torch's AveragedModel; lending it; what is refused meanwhile."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from core.optimizer import OptimizerConfig, ShardedAdamW, build_optimizer
from core.optimizer.state.offload import Offload
from tests.optimizer.fake_shard import FakeShard
from tests.optimizer.test_sharded import DTYPES, Net, give

DECAY = 0.9
CONFIG = OptimizerConfig(lr=0.1, weight_decay=0.3, clip_grad=0.5, ema_decay=DECAY)


def steps(model, optimizer, count=4, skipped=2):
    """After each update, of which number `skipped` is none."""
    for step in range(count):
        give(model, step)
        stats = optimizer.step(num_tokens=0 if step == skipped else 1)
        assert bool(stats.skipped) == (step == skipped)
        optimizer.zero_grad()
        yield step


def averages(optimizer):
    return {name: kinds["ema"].tensor.clone() for name, kinds in optimizer.states().items()}


def mains(optimizer):
    return {name: kinds["main"].tensor.clone() for name, kinds in optimizer.states().items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_a_plain_loops(dtype):
    model = Net(dtype)
    ours = ShardedAdamW(FakeShard(model), CONFIG)
    expected = {name: main.double() for name, main in mains(ours).items()}
    for step in steps(model, ours):
        if step != 2:
            for name, main in mains(ours).items():
                expected[name] = DECAY * expected[name] + (1 - DECAY) * main.double()
        for name, average in averages(ours).items():
            assert average.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            difference = (average.double() - expected[name]).abs().max() / expected[name].abs().max()
            assert difference < (1e-14 if dtype == torch.float64 else 1e-6), (step, name)


def test_it_is_torchs():
    model = Net(torch.float64)
    ours = ShardedAdamW(FakeShard(model), CONFIG)
    twin = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    twin.update_parameters(model)  # its first call copies
    for _ in steps(model, ours, skipped=None):
        twin.update_parameters(model)
    for name, average in averages(ours).items():
        torch.testing.assert_close(average, twin.module.get_parameter(name).detach(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("offload", [None, 0.4, 1.0])
def test_any_update_and_offload_has_it(kind, offload, monkeypatch):
    if kind == "muon" and offload:
        pytest.skip("Muon has no offload")
    monkeypatch.setattr("core.optimizer.state.state_buffers.COMPARE_CHUNK", 100)
    config = OptimizerConfig(optimizer=kind, lr=0.1, clip_grad=0.5, ema_decay=DECAY, muon_except="scale")
    model = Net()
    ours = build_optimizer(
        FakeShard(model), config, offload=Offload(kind="cpu", fraction=offload) if offload else None
    )
    expected = mains(ours)
    for step in steps(model, ours):
        for name, main in mains(ours).items():
            if step != 2:
                expected[name] = DECAY * expected[name] + (1 - DECAY) * main
    for name, average in averages(ours).items():
        torch.testing.assert_close(average, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("main_params", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lent_weights_come_back_bit_for_bit(dtype, main_params):
    if not main_params and dtype != torch.bfloat16:
        pytest.skip("only bfloat16 weights live without main weights")
    model = Net(dtype)
    ours = ShardedAdamW(FakeShard(model), OptimizerConfig(lr=0.1, ema_decay=DECAY, main_params=main_params))
    for _ in steps(model, ours):
        pass
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    states, published = averages(ours), ours.shard.published
    with ours.averaged():
        for name, p in model.named_parameters():
            assert torch.equal(p, states[name].to(dtype).view_as(p)), name
            assert not torch.equal(p, before[name])
        refusals = (ours.step, ours.sharded_state_dict, ours.state_dict, ours.states, lambda: ours.averaged())
        for call in refusals:
            with pytest.raises(ValueError, match=r"their average inside .*leave the block first"):
                call()
    assert ours.shard.published == published + 2
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
    for name, average in averages(ours).items():
        assert torch.equal(average, states[name]), name
    with pytest.raises(KeyError), ours.averaged():
        raise KeyError("of the evaluation")
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
    for _ in steps(model, ours):
        pass


def test_it_begins_as_the_weights_before_the_first_step():
    """Also where they were loaded after the optimizer was made."""
    model, other = Net(), Net()
    ours = ShardedAdamW(FakeShard(model), CONFIG)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3.0)
    model.load_state_dict(other.state_dict())
    next(steps(model, ours))
    for name, average in averages(ours).items():
        start, now = other.get_parameter(name).detach(), model.get_parameter(name).detach()
        torch.testing.assert_close(average, DECAY * start + (1 - DECAY) * now, rtol=1e-6, atol=1e-6)


def test_without_a_decay_there_is_none():
    model = Net()
    ours = ShardedAdamW(FakeShard(model), OptimizerConfig())
    assert set(ours.states()["first"]) == {"main", "exp_avg", "exp_avg_sq"} and not ours.averages
    with pytest.raises(ValueError, match=r"ema_decay=0 keeps no average of the weights; give OptimizerConfig\(ema"):
        ours.averaged()
    with pytest.raises(ValueError, match=r"ema_decay=1.0 must be at least 0 \(no average\) and below 1"):
        OptimizerConfig(ema_decay=1.0)


def test_state_dict_carries_it():
    model, again = Net(), Net()
    ours, other = (ShardedAdamW(FakeShard(m), CONFIG) for m in (model, again))
    for _ in steps(model, ours):
        pass
    again.load_state_dict(model.state_dict())
    other.load_state_dict(ours.state_dict())
    for name, average in averages(other).items():
        assert torch.equal(average, averages(ours)[name])
