"""Megatron's rates and decays, counts of microbatches and timers, by their formulas."""

import json
import logging
from math import cos, pi, sqrt
from types import SimpleNamespace

import pytest

from core.interop.megatron import num_microbatches_calculator as calculator
from core.interop.megatron.optimizer_param_scheduler import OptimizerParamScheduler
from core.interop.megatron.timers import Timers

WARMUP, END, LAST = 10, 110, 40
RATES = {  # of step n > WARMUP, between max_lr 1 and min_lr 0.1
    "constant": lambda n: 1.0,
    "linear": lambda n: 0.1 + 0.9 * (1 - (n - 10) / 100),
    "cosine": lambda n: 0.1 + 0.9 * (1 + cos(pi * (n - 10) / 100)) / 2,
    "inverse-square-root": lambda n: max(0.1, sqrt(10 / n)),
    "WSD linear": lambda n: 1.0 if n <= 70 else 0.1 + 0.9 * (1 - (n - 70) / 40),
    "WSD cosine": lambda n: 1.0 if n <= 70 else 0.1 + 0.9 * (1 + cos(pi * (n - 70) / 40)) / 2,
    "WSD exponential": lambda n: 1.0 if n <= 70 else 0.1 + 0.9 * (2 * 0.5 ** ((n - 70) / 40) - 1),
    "WSD minus_sqrt": lambda n: 1.0 if n <= 70 else 0.1 + 0.9 * (1 - sqrt((n - 70) / 40)),
}


def groups():
    return SimpleNamespace(
        param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}, {"max_lr": 0.5, "min_lr": 0.0, "wd_mult": 2.0}]
    )


def scheduler(optimizer, **more):
    settings = {
        "init_lr": 0.02, "max_lr": 1.0, "min_lr": 0.1, "lr_warmup_steps": WARMUP, "lr_decay_steps": END,
        "lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 0, "wd_incr_style": "constant",
    }  # fmt: skip
    return OptimizerParamScheduler(optimizer, **settings | more)


@pytest.mark.parametrize("style", RATES)
def test_rates_are_the_formulas(style):
    optimizer = groups()
    kind, _, last = style.partition(" ")
    found = scheduler(optimizer, lr_decay_style=kind, wsd_decay_steps=LAST, lr_wsd_decay_style=last or None)
    for n in range(0, 140, 5):
        if n <= WARMUP:
            want = 0.02 + 0.98 * n / WARMUP
        elif n > END and kind != "constant":
            want = 0.1
        else:
            want = RATES[style](n)
        assert found.get_lr({}) == pytest.approx(want, rel=1e-12), n
        assert optimizer.param_groups[0]["lr"] == found.get_lr({})
        if n <= WARMUP:
            assert optimizer.param_groups[2]["lr"] == pytest.approx(0.02 + 0.48 * n / WARMUP, rel=1e-12)
        found.step(increment=5)


@pytest.mark.parametrize(
    "style, at",
    [("linear", lambda n: 0.1 + 0.2 * n / 50), ("cosine", lambda n: 0.1 + 0.2 * (1 + cos(pi * (1 - n / 50))) / 2)],
)
def test_decays_grow_by_the_formulas(style, at):
    optimizer = groups()
    found = scheduler(optimizer, end_wd=0.3, wd_incr_steps=50, wd_incr_style=style)
    for n in range(0, 70, 7):
        want = at(n) if n <= 50 else 0.3
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        assert decays == pytest.approx([want, 0.0, 2 * want], rel=1e-12)
        found.step(7)


def test_a_schedule_goes_on_from_its_state():
    first = scheduler(groups())
    first.step(37)
    state = json.loads(json.dumps(first.state_dict()))
    other = scheduler(groups(), max_lr=0.7)
    other.load_state_dict(state)
    assert (other.max_lr, other.num_steps, other.get_lr({})) == (1.0, 37, first.get_lr({}))
    mine = scheduler(
        groups(), max_lr=0.7, use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True
    )
    mine.load_state_dict(state)
    assert (mine.max_lr, mine.num_steps) == (0.7, 37)
    strict = scheduler(groups(), max_lr=0.7, use_checkpoint_opt_param_scheduler=False)
    with pytest.raises(ValueError, match=r"max_lr=0.7 here and 1.0 in the checkpoint; say use_checkpoint_opt"):
        strict.load_state_dict(state)
    assert strict.num_steps == 0


@pytest.mark.parametrize(
    "more, words",
    [
        ({"lr_decay_style": "cosin"}, "lr_decay_style='cosin' is none of the 5: constant, linear, cosine, inverse"),
        ({"lr_decay_style": "WSD"}, "lr_decay_style='WSD' with 0 wsd_decay_steps; give at least 1"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 3}, "lr_wsd_decay_style=None is none of the 4: linear"),
        ({"lr_warmup_steps": 110}, "lr_warmup_steps=110 must be below lr_decay_steps=110"),
        ({"min_lr": 2.0}, "init_lr=0.02, max_lr=1.0, min_lr=2.0; max_lr must be the largest"),
        ({"end_wd": 0.2}, "wd_incr_style='constant' with start_wd=0.1 and end_wd=0.2; give the same number"),
        ({"wd_incr_style": "linear"}, "wd_incr_steps=0 of wd_incr_style='linear' must be at least 1"),
        ({"start_wd": 0.2}, "start_wd=0.2 must be at least 0 and at most end_wd=0.1"),
        ({"override_opt_param_scheduler": True}, "are both True; leave 1 of 2"),
    ],
)
def test_a_wrong_schedule_is_refused(more, words):
    with pytest.raises(ValueError, match=words):
        scheduler(groups(), **more)


@pytest.fixture
def counts():
    calculator.destroy_num_microbatches_calculator()
    yield calculator
    calculator.destroy_num_microbatches_calculator()


def test_a_constant_batch(counts):
    with pytest.raises(ValueError, match=r"0 calculators: call init_num_microbatches_calculator\(rank, rampup"):
        counts.get_num_microbatches()
    counts.init_num_microbatches_calculator(0, None, 64, 4, 2)
    assert (counts.get_num_microbatches(), counts.get_current_global_batch_size()) == (8, 64)
    assert counts.get_micro_batch_size() == 4
    counts.update_num_microbatches(10_000)
    assert counts.get_num_microbatches() == 8
    with pytest.raises(ValueError, match="there is a calculator of global_batch_size=64 already; call destroy_num"):
        counts.init_num_microbatches_calculator(0, None, 64, 4, 2)
    counts.reconfigure_num_microbatches_calculator(0, None, 70, 4, 2, True)
    assert (counts.get_num_microbatches(), counts.get_current_running_global_batch_size()) == (8, 64)
    assert counts.get_current_global_batch_size() == 70
    for sizes, words in (
        (
            (None, 70, 4, 2),
            "global_batch_size=70 does not divide by micro_batch_size=4 times data_parallel_size=2; m",
        ),
        (
            (None, 4, 4, 2, True),
            "global_batch_size=4 is below micro_batch_size=4 times data_parallel_size=2: 0 micro",
        ),
        ((None, 64, 0, 2), "micro_batch_size=0 must be at least 1"),
        (([16, 16], 64, 4, 2), "rampup_batch_size has 2 numbers; give 3: the first global batch"),
        (([16, 10, 100], 64, 4, 2), r"rampup_batch_size=\[16, 10, 100\]: from 16 .* by steps of 10 the batch"),
    ):
        with pytest.raises(ValueError, match=words):
            counts.reconfigure_num_microbatches_calculator(0, *sizes)
        assert counts.get_num_microbatches() == 8, "the one before is kept"


def test_a_batch_that_grows(counts):
    """From 16 by 16 to 64 within 300 samples: 100 of each size."""
    counts.init_num_microbatches_calculator(0, [16, 16, 300], 64, 4, 2)
    for consumed, batch in ((0, 16), (99, 16), (100, 32), (250, 48), (300, 64), (301, 64), (9999, 64)):
        counts.update_num_microbatches(consumed)
        assert counts.get_current_global_batch_size() == batch
        assert counts.get_num_microbatches() == batch // 8
    counts.reconfigure_num_microbatches_calculator(0, [12, 4, 80], 20, 4, 2, True)
    assert (counts.get_num_microbatches(), counts.get_current_running_global_batch_size()) == (1, 8)
    counts.reconfigure_num_microbatches_calculator(0, [16, 4, 80], 24, 4, 2)
    with pytest.raises(ValueError, match="global_batch_size=20 does not divide by"):
        counts.update_num_microbatches(40)


def test_timers(caplog):
    timers = Timers(1, "minmax")
    timers("step", log_level=0).start(barrier=True)
    timers("step").stop()
    first = timers("step").elapsed(reset=False)
    assert first > 0 and timers("step").active_time() == first
    timers("inner", log_level=2).start()  # above the level: measures nothing
    timers("inner", log_level=2).stop()
    with caplog.at_level(logging.INFO):
        timers.log(["step", "inner"], normalizer=2.0, reset=False)
    (line,) = caplog.messages
    assert line.startswith("(min, max) time across ranks (ms):\n    step ......")
    assert line.endswith(f"({first * 500:.2f}, {first * 500:.2f})") and "inner" not in line
    written = []
    timers.write(["step"], SimpleNamespace(add_scalar=lambda *of: written.append(of)), 7)
    assert written == [("step-time", first, 7)]
    assert timers("step").elapsed() == 0 and Timers(0, "all").get_all_timers_string() is None
    with pytest.raises(ValueError, match=r"timer 'step' runs 0 times; start\(\) it first"):
        timers("step").stop()
    with pytest.raises(ValueError, match="timer 'step' has log_level=0, not 1; say the same"):
        timers("step", log_level=1)
    with pytest.raises(ValueError, match="log_option='mean' is none of the 3: max, minmax, all"):
        Timers(0, "mean")
