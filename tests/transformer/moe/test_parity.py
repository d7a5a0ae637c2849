"""Experts on every layout: one process's loss, gradients and norm, initial weights bit for bit; float64."""

import pytest

from tests.parity.pipelines import differences
from tests.transformer.moe.layouts import reference, step

# (facts, layout of 1 or 2 ranks): each value of a factor at least once
ONE = [
    ({"router": "sigmoid", "balancing": "sequence", "shared": True}, {"recompute": "layer"}),
    ({"router": "groups", "balancing": "microbatch"}, {"recompute": "selective"}),
]
TWO = [
    ({"balancing": "sequence"}, {"expert": 2, "zero": 0}),
    (
        {"router": "sigmoid", "shared": True, "balancing": "microbatch"},
        {"expert": 2, "zero": 3, "recompute": "layer"},
    ),
    ({"router": "groups", "balancing": "sequence"}, {"tp": 2, "expert": 2, "zero": 1}),
    (
        {"router": "pre_softmax", "shared": True, "balancing": "sequence"},
        {"tp": 2, "sp": True, "expert": 2, "zero": 2},
    ),
    ({"balancing": "microbatch"}, {"tp": 2, "zero": 2, "recompute": "layer"}),
    ({"layers": 4, "balancing": "sequence"}, {"pp": 2, "schedule": "zb-v", "recompute": "stage", "zero": 1}),
    ({"layers": 4, "moe_layer_freq": (0, 1, 1, 0)}, {"pp": 2, "schedule": "interleaved-zb", "recompute": "layer"}),
    ({"layers": 4, "router": "sigmoid"}, {"pp": 2, "schedule": "1f1b", "recompute": "layer", "zero": 3}),
]
FOUR = [
    ({"shared": True, "balancing": "sequence"}, {"expert": 4, "zero": 1}),
    ({"balancing": "microbatch", "router": "sigmoid"}, {"tp": 2, "sp": True, "expert": 2, "zero": 2}),
    ({"balancing": "sequence"}, {"tp": 2, "expert": 4, "zero": 3, "recompute": "layer"}),
    (
        {"layers": 4, "balancing": "sequence"},
        {"pp": 2, "expert": 2, "schedule": "zb-v", "recompute": "stage", "zero": 1},
    ),
    (
        {"layers": 4, "balancing": "microbatch", "shared": True},
        {"pp": 2, "tp": 2, "sp": True, "expert": 2, "schedule": "1f1b", "zero": 3},
    ),
    ({"balancing": "sequence", "router": "groups"}, {"expert": 2, "zero": 2}),
    (
        {"layers": 3, "moe_layer_freq": (0, 0, 1), "balancing": "sequence", "shared": True},
        {"pp": 2, "tp": 2, "sp": True, "expert": 2, "schedule": "1f1b", "zero": 2},
    ),
    ({"balancing": "sequence", "shared": True}, {"cp": 2, "expert": 2, "zero": 1, "recompute": "layer"}),
    ({"balancing": "microbatch"}, {"cp": 2, "tp": 2, "sp": True, "expert": 4, "zero": 3}),
]


def compare(cases):
    """What is not one process's, by case."""
    wrong = {}
    for facts, layout in cases:
        found, want = step(facts, **layout), reference(**facts)[:3]
        if told := differences(found, want):
            wrong[str((facts, layout))] = told
    return wrong


@pytest.mark.parametrize("world, cases", [(1, ONE), (2, TWO)])
def test_experts_on_one_and_two_ranks(ranks, world, cases):
    assert not any(ranks(compare, cases, world=world, timeout=300))


@pytest.mark.parametrize("cases", [FOUR[:4], FOUR[4:]])
def test_experts_on_four_ranks(ranks, cases):
    assert not any(ranks(compare, cases, world=4, timeout=300))
