"""Learning rates: ends, bounds and directions, for every kind and any sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.optimizer import LearningRate, OptimizerConfig


@st.composite
def schedules(draw):
    warmup, down = draw(st.integers(0, 40)), draw(st.integers(1, 60))
    peak = draw(st.floats(1e-6, 1.0))
    return LearningRate(
        peak=peak,
        minimum=peak * draw(st.floats(0, 1)),
        warmup_steps=warmup,
        total_steps=warmup + down,
        kind=draw(st.sampled_from(["constant", "linear", "cosine", "wsd"])),
        decay_steps=draw(st.integers(1, down)),
    )


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_up_to_the_peak_then_down_to_the_minimum(rate):
    at = [rate.at(step) for step in range(rate.total_steps + 3)]
    up, down = at[: rate.warmup_steps], at[rate.warmup_steps :]
    assert all(0 < r <= rate.peak for r in up) and up == sorted(up)
    assert not up or up[-1] == rate.peak
    assert down[0] == pytest.approx(rate.peak) and down == sorted(down, reverse=True)
    assert all(rate.minimum <= r <= rate.peak * (1 + 1e-12) for r in down)
    assert at[-3:] == [rate.peak if rate.kind == "constant" else rate.minimum] * 3


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_half_way(rate):
    """Linear and cosine are half way down in the middle; wsd is at the peak until its decay begins."""
    length = rate.total_steps - rate.warmup_steps
    middle = (rate.peak + rate.minimum) / 2
    if rate.kind in ("linear", "cosine") and length % 2 == 0:
        assert rate.at(rate.warmup_steps + length // 2) == pytest.approx(middle)
    if rate.kind == "wsd":
        begin = rate.total_steps - rate.decay_steps
        assert all(rate.at(step) == pytest.approx(rate.peak) for step in range(rate.warmup_steps, begin + 1))
        if rate.decay_steps % 2 == 0:
            assert rate.at(begin + rate.decay_steps // 2) == pytest.approx(middle)


def test_known_values():
    kinds = {kind: LearningRate(peak=1.0, warmup_steps=2, total_steps=6, kind=kind) for kind in ("linear", "cosine")}
    assert [kinds["linear"].at(s) for s in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert kinds["cosine"].at(3) == pytest.approx(0.8535533905932737)
    assert LearningRate(peak=2.0).at(10**9) == 2.0


def test_inverse_square_root():
    warm = LearningRate(peak=1.0, warmup_steps=4, kind="inverse_sqrt", minimum=0.125)
    assert [warm.at(s) for s in (0, 3, 4, 16, 64)] == [0.25, 1.0, 1.0, 0.5, 0.25], "peak * sqrt(4 / step)"
    assert warm.at(10**6) == 0.125, "not below the minimum"
    cold = LearningRate(peak=1.0, kind="inverse_sqrt")
    assert [cold.at(s) for s in (0, 3, 99)] == [1.0, 0.5, 0.1]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"kind": "step"}, "kind='step' is unknown; known: constant, linear, cosine, wsd, inverse_sqrt"),
        ({"minimum": 2.0}, "minimum=2.0 must be between 0 and peak=1.0"),
        ({"kind": "cosine"}, "give total_steps"),
        ({"kind": "linear", "total_steps": 5, "warmup_steps": 5}, "total_steps=5 must be more than warmup_steps=5"),
        ({"kind": "wsd", "total_steps": 5, "decay_steps": 6}, r"decay_steps=6 .* from 1 to total_steps\(5\)"),
        ({"kind": "wsd", "total_steps": 5}, "decay_steps=None"),
    ],
)
def test_mistakes_are_told(wrong, told):
    with pytest.raises(ValueError, match=told):
        LearningRate(peak=1.0, **wrong)


def test_a_config_tells_all_its_mistakes_at_once():
    with pytest.raises(ValueError) as error:
        OptimizerConfig(lr_schedule="exp", weight_decay=-1, adam_beta2=1.0, clip_grad=-0.5)
    for word in ("lr_schedule='exp'", "weight_decay=-1", "adam_beta2=1.0", "clip_grad=-0.5"):
        assert word in str(error.value)


def test_a_config_describes_its_schedule():
    config = OptimizerConfig(
        lr=2.0, min_lr=1.0, lr_schedule="wsd", lr_warmup_steps=2, lr_decay_steps=10, lr_wsd_decay_steps=4
    )
    assert [config.learning_rate.at(s) for s in (0, 1, 6, 8, 10)] == [1.0, 2.0, 2.0, 1.5, 1.0]


def test_a_warm_up_as_a_share_of_the_whole():
    told = {"lr": 2.0, "lr_schedule": "cosine", "lr_decay_steps": 50}
    share = OptimizerConfig(**told, lr_warmup_fraction=0.1).learning_rate
    steps = OptimizerConfig(**told, lr_warmup_steps=5).learning_rate
    assert [share.at(n) for n in range(60)] == [steps.at(n) for n in range(60)]
    both = OptimizerConfig(**told, lr_warmup_steps=5, lr_warmup_fraction=0.5)
    assert both.learning_rate == steps, "the number of steps goes before"
    with pytest.raises(ValueError, match=r"lr_warmup_fraction=0\.1 is a share of lr_decay_steps, which is None"):
        OptimizerConfig(lr_warmup_fraction=0.1)
    with pytest.raises(ValueError, match=r"lr_warmup_fraction=1\.0 must be at least 0 and below 1"):
        OptimizerConfig(**told, lr_warmup_fraction=1.0)
