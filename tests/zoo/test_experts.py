"""Experts of which every rank holds others: habits with their weights."""

import pytest

from tests.zoo.case import judge, observe
from tests.zoo.experts import CASES, FAMILY


def outcomes(names, variation):
    """Cases are closures, which do not travel: by name."""
    return [observe(next(c for c in CASES if c.what == name).run, variation) for name in names]


def hold(ranks, cases, variation):
    seen = ranks(outcomes, [case.what for case in cases], variation, world=2, timeout=240)
    for place, case in enumerate(cases):
        judge(case, [rank[place] for rank in seen], variation)


def test_some(ranks):
    hold(ranks, CASES[1:3] + CASES[-1:], FAMILY.variations[0])


@pytest.mark.full
@pytest.mark.parametrize("variation", FAMILY.variations, ids=str)
def test_all(ranks, variation):
    hold(ranks, CASES, variation)
