"""Updates that are skipped because their gradient norm is a spike: all ranks alike, as if they had not been."""

import statistics

import pytest
import torch

from core import dist_checkpointing
from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW, build_optimizer, sharded_state_dict
from core.optimizer.step.spikes import Spikes
from tests.optimizer.fake_shard import FakeShard
from tests.optimizer.test_sharded import Net, equal, flat, give
from tests.parity.test_sharded_steps import Net as SplitNet
from tests.parity.test_sharded_steps import batch
from tests.states import state

CPU = torch.device("cpu")
FACTS = {"lr": 0.1, "clip_grad": 0.5, "skip_grad_norm_above": 3.0, "skip_window": 4}


@pytest.mark.parametrize("window", [2, 5, 8])
def test_a_spike_is_above_the_factor_times_the_median_of_the_last_norms(window):
    norms = torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64).square() * 4
    norms[20], norms[41] = torch.inf, torch.nan
    watch, seen, count = Spikes(2.5, window, CPU), [], 0
    for norm in norms:
        before = sorted(seen[-window:])
        found, median = watch.look(norm)
        expected = False
        if len(seen) >= window / 2:
            assert median == statistics.median_low(before)
            expected = bool(torch.isfinite(norm)) and norm > 2.5 * median
        else:
            assert median.isnan()
        assert found == expected
        count += expected
        seen += [norm.item()] if torch.isfinite(norm) else []
    assert 5 < count < 40
    again = Spikes(2.5, window, CPU)
    again.load(watch.state()["norms"])
    for norm in norms[:9]:
        assert [x.item() for x in again.look(norm)] == [x.item() for x in watch.look(norm)]


def test_what_is_off_or_zero_is_no_spike():
    off, still = Spikes(0.0, 4, CPU), Spikes(2.0, 2, CPU)
    for _ in range(4):
        assert off.look(torch.tensor(9.0).double()) == (torch.tensor(False), None)
        assert not still.look(torch.zeros((), dtype=torch.float64))[0]
    assert not still.look(torch.ones((), dtype=torch.float64))[0], "the median is 0: it says nothing"
    assert off.state() == {}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_spike_leaves_everything_as_if_it_had_not_been(optimizer):
    """Weights, states, Adam's count and the average; only the rate's schedule has gone on."""
    facts = FACTS | {"optimizer": optimizer, "ema_decay": 0.9, "muon_except": "scale"}
    pairs = []
    for more in ({}, {"skip_grad_norm_above": 0.0}):
        model = Net()
        pairs.append((model, build_optimizer(FakeShard(model), OptimizerConfig(**facts | more))))
    (model, ours), (twin_model, twin) = pairs
    for step in range(8):
        spike = step in (4, 6)
        give(model, step, 100.0 if spike else 1.0)
        stats = ours.step(num_tokens=1)
        assert stats.skipped == spike and not stats.found_inf
        assert bool(stats.spike_in_words()) == spike
        ours.zero_grad()
        if not spike:
            give(twin_model, step)
            assert not twin.step(num_tokens=1).skipped
            twin.zero_grad()
    equal(ours, twin)
    assert (ours.step_count, ours.skipped_steps, twin.step_count) == (8, 2, 6)
    median = stats.median_norm.item()
    assert median == pytest.approx(stats.grad_norm.item(), rel=0.2)


def test_a_parameter_without_a_gradient_misses_no_update_in_a_skipped_step():
    """Its own count of updates, by which Adam corrects its moments, is of those that were made without it."""
    pairs = []
    for more in ({}, {"skip_grad_norm_above": 0.0}):
        model = Net()
        shard = FakeShard(model)
        pairs.append((model, shard, ShardedAdamW(shard, OptimizerConfig(**FACTS | more))))
    (model, shard, ours), (twin_model, _, twin) = pairs
    for step in range(6):
        spike = step == 3
        shard.missing = ["scale"] if spike else []
        give(model, step, 100.0 if spike else 1.0)
        assert ours.step(num_tokens=1).skipped == spike
        ours.zero_grad()
        if not spike:
            give(twin_model, step)
            twin.step(num_tokens=1)
            twin.zero_grad()
    equal(ours, twin)


def test_norms_that_stay_high_are_no_spikes_for_long():
    model, ours = flat(torch.float32, OptimizerConfig(**FACTS))
    skipped = []
    for step in range(10):
        give(model, step, 100.0 if step >= 4 else 1.0)
        skipped.append(bool(ours.step(num_tokens=1).skipped))
        ours.zero_grad()
    assert skipped == [step in (4, 5, 6) for step in range(10)], "then half of the window is as high"


def test_many_spikes_in_a_row_end_the_run_where_the_user_says_so():
    model, ours = flat(torch.float32, OptimizerConfig(**FACTS, max_skipped_steps=2))
    for step in range(5):
        give(model, step, 100.0 if step == 4 else 1.0)
        ours.step(num_tokens=1)
        ours.zero_grad()
    give(model, 5, 100.0)
    words = (
        r"step 6: 2 steps in a row were skipped.*the gradient norm .* is 9[\d.]+ times the median .* of those before"
    )
    with pytest.raises(RuntimeError, match=words):
        ours.step(num_tokens=1)


def trained(zero, directory):
    """Three norms, then a spike that one data rank alone sees in its rows; saved, and gone on with two ways."""
    ps = state()
    made = []
    for seed in (0, 1):
        model = SplitNet(torch.float64)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + seed)
        shard = DataParallel(model, ps, zero_stage=zero, bucket_size=100)
        made.append((model, shard, ShardedAdamW(shard, OptimizerConfig(**FACTS))))

    def step(model, optimizer, number):
        factor = 1e3 if number in (3, 4) and ps.index("dp") == ps.size("dp") - 1 else 1.0
        (model(batch(number, ps, torch.float64)) * factor).backward()
        stats = optimizer.step(num_tokens=3 * ps.size("dp"))
        optimizer.zero_grad()
        return bool(stats.skipped), stats.grad_norm.item()

    (model, shard, optimizer), (other_model, other_shard, other) = made
    told = [step(model, optimizer, number) for number in range(4)]
    saved = {"model": sharded_state_dict(shard), "optimizer": optimizer.sharded_state_dict()}
    dist_checkpointing.save(saved, directory, ps=ps)
    into = {"model": sharded_state_dict(other_shard), "optimizer": other.sharded_state_dict()}
    other.load_state_dict(dist_checkpointing.load(into, directory, ps=ps)["optimizer"])
    local = optimizer.state_dict()
    goes_on = [step(model, optimizer, number) for number in range(4, 7)]
    resumed = [step(other_model, other, number) for number in range(4, 7)]
    assert resumed == goes_on, "norms and verdicts are those of the run that was not interrupted"
    optimizer.load_state_dict(local)
    assert optimizer._spikes.state() == {"norms": [norm for _, norm in told]}
    return told + goes_on


@pytest.mark.parametrize("zero, world", [(0, 2), (3, 3)])
def test_all_ranks_skip_alike_and_a_resumed_run_too(ranks, tmp_path, zero, world):
    first, *others = ranks(trained, zero, str(tmp_path / "at"), world=world)
    assert all(other == first for other in others)
    assert [skipped for skipped, _ in first] == [False, False, False, True, True, False, False]


def test_a_state_without_norms_begins_anew_and_one_with_norms_fits_an_optimizer_that_keeps_none():
    model, ours = flat(torch.float32, OptimizerConfig(**FACTS))
    _, plain = flat(torch.float32, OptimizerConfig(lr=0.1))
    for step in range(3):
        give(model, step)
        ours.step(num_tokens=1)
        ours.zero_grad()
    without, saved = plain.state_dict(), ours.state_dict()
    assert without["local"]["step_count"] == 0 and len(saved["local"]["step_count"]["norms"]) == 3
    plain.load_state_dict(saved)
    assert plain.step_count == 3 and plain.state_dict()["local"]["step_count"] == 3
    ours.load_state_dict(without)
    assert ours._spikes.state() == {} and ours.step_count == 0


def test_the_configuration_says_what_is_wrong():
    with pytest.raises(ValueError, match=r"skip_grad_norm_above=0.5 must be above 1 .*; skip_window=1 must be at"):
        OptimizerConfig(skip_grad_norm_above=0.5, skip_window=1)
