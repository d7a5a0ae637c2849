"""DeepSpeed's schedules: the rates that its own classes gave (0.19.8, update by update), shapes, and mistakes."""

import math

import pytest
import tyro

from core.optimizer import OptimizerConfig
from core.optimizer.schedules.deepspeed import SCHEDULES, schedule

LR = 2.0
WARM = {"warmup_max_lr": 1.0, "warmup_num_steps": 4}
DOWN = {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 6}
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_momentum": False}
RANGE = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5}
GIVEN = {  # what a torch.optim.SGD(lr=2.0) had before each update under deepspeed.runtime.lr_schedules
    "log": ("WarmupLR", WARM, [0.0, 0.0, 0.5, 0.792481250361, 1.0, 1.0, 1.0]),
    "linear": (
        "WarmupLR",
        WARM | {"warmup_type": "linear", "warmup_min_lr": 0.2},
        [0.2, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0],
    ),
    "decay": ("WarmupDecayLR", DOWN | {"warmup_max_lr": 1.0}, [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
    "cosine": (
        "WarmupCosineLR",
        DOWN | {"warmup_min_ratio": 0.5, "cos_min_ratio": 0.1},
        [0.0, 1.0, 1.5, 1.736396103068, 1.1, 0.463603896932, 0.2, 0.2, 0.2],
    ),
    "cycle": (
        "OneCycle",
        CYCLE | {"cycle_first_step_size": 2, "cycle_second_step_size": 4, "decay_step_size": 2, "decay_lr_rate": 1.0},
        [0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.066666666667, 0.05, 0.04],
    ),
    "stairs": (
        "OneCycle",
        CYCLE | {"cycle_first_step_size": 4, "cycle_first_stair_count": 2},
        [0.1, 0.1, 0.3, 0.3, 0.5, 0.3, 0.3, 0.1, 0.1, 0.1, 0.1],
    ),
    "range": ("LRRangeTest", RANGE, [0.1, 0.125, 0.15, 0.175, 0.2]),
    "range in stairs": ("LRRangeTest", RANGE | {"lr_range_test_staircase": True}, [0.1, 0.1, 0.15, 0.15, 0.2]),
}


@pytest.mark.parametrize("name, options, rates", GIVEN.values(), ids=GIVEN)
def test_the_rates_are_deepspeeds(name, options, rates):
    found = schedule(name, options, LR)
    assert [found.at(step) for step in range(len(rates))] == pytest.approx(rates, abs=1e-11)


@pytest.mark.parametrize("name, options, rates", GIVEN.values(), ids=GIVEN)
def test_the_config_takes_them_from_texts_too(name, options, rates):
    config = OptimizerConfig(lr=LR, lr_schedule=name, lr_schedule_options={k: str(v) for k, v in options.items()})
    assert config.learning_rate == schedule(name, options, LR)


def test_on_a_command_line():
    line = "--lr 2 --lr-schedule WarmupLR --lr-schedule-options warmup_num_steps 8 warmup_type linear"
    rate = tyro.cli(OptimizerConfig, args=line.split()).learning_rate
    assert [rate.at(step) for step in (0, 1, 5, 9, 99)] == [0.0, 0.0, 1.0, 2.0, 2.0], (
        "up to lr, without warmup_max_lr"
    )


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("warmup", [1, 2, 50])
def test_a_warm_up_rises_to_its_end_and_every_way_down_ends(warmup, warmup_type):
    options = {"warmup_num_steps": warmup, "warmup_type": warmup_type}
    up = schedule("WarmupLR", options, LR)
    rates = [up.at(step) for step in range(60)]
    assert rates == sorted(rates) and rates[0] == 0 and rates[max(2, warmup) + 1 :] == [LR] * (59 - max(2, warmup))
    for name, end in (("WarmupDecayLR", 0.0), ("WarmupCosineLR", 1e-4 * LR)):
        down = schedule(name, options | {"total_num_steps": 100}, LR)
        rates = [down.at(step) for step in range(max(2, warmup) + 1, 110)]
        assert rates == sorted(rates, reverse=True)
        assert rates[-5:] == pytest.approx([end] * 5, abs=1e-15) and max(rates) <= LR


def test_the_cosine_is_half_way_down_in_the_middle():
    rate = schedule("WarmupCosineLR", {"warmup_num_steps": 20, "total_num_steps": 120, "cos_min_ratio": 0.0}, LR)
    assert rate.at(70) == pytest.approx(LR / 2)
    assert rate.at(45) == pytest.approx(LR * (1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("WarmupLR", {"warmup_steps": 5}, "unknown parameter warmup_steps; did you mean warmup_num_steps?"),
        ("WarmupLR", {"x": 5}, "unknown parameter x; known: warmup_num_steps, warmup_type, warmup_max_lr"),
        ("WarmupLR", {"warmup_type": "exp"}, "unknown warmup_type 'exp'; known: log, linear"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps=0 must be at least 1"),
        ("WarmupLR", {"warmup_num_steps": "many"}, "warmup_num_steps='many' is not of the kind int"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "warmup_num_steps=1.5 is not of the kind int"),
        ("WarmupLR", {"warmup_min_lr": 3}, r"warmup_min_lr=3\.0 must be between 0 and warmup_max_lr=2"),
        ("WarmupDecayLR", {}, "total_num_steps is missing; give it"),
        ("WarmupDecayLR", {"total_num_steps": 9}, "total_num_steps=9 must be more than warmup_num_steps=1000"),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": 2}, r"cos_min_ratio=2\.0 must be between 0 and 1"),
        (
            "OneCycle",
            CYCLE | {"cycle_momentum": True},
            "cycle_momentum=true is not supported.*use cycle_momentum=false",
        ),
        ("OneCycle", CYCLE | {"cycle_min_mom": 0.8}, r"cycle_min_mom=0\.8 is not supported"),
        ("OneCycle", CYCLE | {"cycle_first_step_size": 0}, "cycle_first_step_size=0 must be at least 1"),
        ("OneCycle", {"cycle_min_lr": 1}, "cycle_max_lr is missing"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size=0 must be at least 1"),
        ("LRRangeTest", {"lr_range_test_staircase": "perhaps"}, "'perhaps' is not of the kind bool"),
        (
            "cosine",
            {"lr": 1},
            r"lr_schedule=cosine has its own fields and takes 0 lr_schedule_options, 1 given \(lr\)",
        ),
        ("WarmUpLR", {}, r"lr_schedule='WarmUpLR' is unknown; did you mean WarmupLR\? known: constant, .*WarmupLR"),
    ],
)
def test_mistakes_are_told(name, options, told):
    with pytest.raises(ValueError, match=told):
        OptimizerConfig(lr=LR, lr_schedule=name, lr_schedule_options=options, lr_decay_steps=5)


def test_the_five_names():
    assert list(SCHEDULES) == ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]
