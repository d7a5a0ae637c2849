"""Modules of a program's own on one tensor rank and on two."""

import pytest

from tests.zoo.case import judge, observe
from tests.zoo.own_model import IN_LAYER, LAYOUTS, TWO
from tests.zoo.own_modules import CASES, FAMILY


def outcomes(names, variation):
    """Cases are closures, which do not travel: by name."""
    return [observe(next(c for c in CASES if c.what == name).run, variation) for name in names]


def hold(ranks, cases, variation):
    seen = ranks(outcomes, [case.what for case in cases], variation, world=LAYOUTS[variation], timeout=240)
    for place, case in enumerate(cases):
        judge(case, [rank[place] for rank in seen], variation)


@pytest.mark.parametrize("variation", FAMILY.variations, ids=str)
def test_some(ranks, variation):
    hold(ranks, CASES[::4], variation)


def hold_in_layers(ranks, cases):
    seen = ranks(outcomes, [case.what for case in cases], IN_LAYER, world=2, timeout=240)
    for place, case in enumerate(cases):
        judge(case, [rank[place] for rank in seen], TWO)


BETWEEN = [case for case in CASES if getattr(case.run, "is_feedforward", False)]


def test_some_in_a_layer(ranks):
    hold_in_layers(ranks, BETWEEN[::4])


@pytest.mark.full
def test_all_in_a_layer(ranks):
    assert len(BETWEEN) > 40
    hold_in_layers(ranks, BETWEEN)


@pytest.mark.full
@pytest.mark.parametrize("variation", FAMILY.variations, ids=str)
def test_all(ranks, variation):
    hold(ranks, CASES, variation)
