"""Modules of a program's own on one tensor rank and on two."""

import pytest

from tests.zoo.case import judge, observe
from tests.zoo.own_model import LAYOUTS
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


@pytest.mark.full
@pytest.mark.parametrize("variation", FAMILY.variations, ids=str)
def test_all(ranks, variation):
    hold(ranks, CASES, variation)
