"""Experts on every layout: one process's loss, gradients and norm, initial weights bit for bit; float64."""

import random
from functools import cache
from itertools import combinations

import pytest

from tests.marks import FULL, thinned
from tests.parity.pipelines import differences
from tests.transformer.moe.layouts import BALANCING, ROUTERS, compare_after_steps, reference, step

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


# Every pair of values of two factors that go together, on four ranks.
FACTORS = {
    "sizes": [
        {"expert": 2},
        {"expert": 4},
        {"tp": 2, "expert": 2},
        {"tp": 2, "expert": 4, "sp": True},
        {"cp": 2, "expert": 4},
        {"cp": 2, "tp": 2, "sp": True, "expert": 2},
        {"pp": 2, "expert": 2},
        {"pp": 2, "tp": 2, "sp": True, "expert": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "cp": 2, "expert": 2},
    ],
    "schedule": ["none", "1f1b", "zb-v", "interleaved-zb"],
    "zero": [0, 1, 2, 3],
    "recompute": ["none", "selective", "layer", "stage"],
    "router": list(ROUTERS),
    "balancing": list(BALANCING),
    "shared": [False, True],
    "kinds": [None, (0, 1, 1, 1), (1, 0, 0, 1)],
    "tied": [False, True],
}


def goes_together(case):
    """A schedule is a pipeline's, and so is a stage that is recomputed."""
    stages = "pp" in case.get("sizes", {})
    if "sizes" in case and "schedule" in case and stages == (case["schedule"] == "none"):
        return False
    alone = ("sizes" in case and not stages) or case.get("schedule") == "none"
    return not (alone and case.get("recompute") == "stage")


def pairs_of(case):
    return {repr(pair) for pair in combinations(case.items(), 2)}


@cache
def drawn_cover():
    """Cases in which every pair that goes together meets: each the best of some drawn ones."""
    wanted = set()
    for one, other in combinations(FACTORS, 2):
        both = [{one: a, other: b} for a in FACTORS[one] for b in FACTORS[other]]
        wanted |= {pair for case in both if goes_together(case) for pair in pairs_of(case)}
    draw, cases = random.Random(0), []
    while wanted:
        drawn = [{name: draw.choice(values) for name, values in FACTORS.items()} for _ in range(100)]
        best = max(filter(goes_together, drawn), key=lambda case: len(pairs_of(case) & wanted))
        if met := pairs_of(best) & wanted:
            wanted -= met
            cases.append(best)
    return cases


def cover():
    """(facts, layout) of them."""
    return list(map(as_facts_and_layout, drawn_cover()))


def as_facts_and_layout(case):
    facts = {"layers": 4} | {name: case[name] for name in ("router", "balancing", "shared", "tied")}
    if case["kinds"] is not None:
        facts["moe_layer_freq"] = case["kinds"]
    return facts, case["sizes"] | {name: case[name] for name in ("zero", "schedule", "recompute")}


IN_MAKE_TEST = 24  # of the cover's cases, in which eight of ten pairs meet


def test_the_first_cases_of_the_cover_have_eight_of_ten_pairs():
    cases = drawn_cover()
    met, all_pairs = (set().union(*map(pairs_of, some)) for some in (cases[:IN_MAKE_TEST], cases))
    assert len(met) >= 0.8 * len(all_pairs)


@pytest.mark.parametrize("start", range(2))
def test_most_pairs_of_values_on_four_ranks(ranks, start):
    assert not any(ranks(compare, cover()[start:IN_MAKE_TEST:2], world=4, timeout=300))


@pytest.mark.full
@pytest.mark.parametrize("start", range(4))
def test_the_other_pairs_of_values_on_four_ranks(ranks, start):
    assert not any(ranks(compare, cover()[IN_MAKE_TEST + start :: 4], world=4, timeout=300))


@pytest.mark.parametrize("start", thinned(range(6), every=6, marks=[FULL]))
def test_every_pair_of_values_after_three_steps(ranks, start):
    ranks(compare_after_steps, cover()[start::6], world=4, timeout=300)
