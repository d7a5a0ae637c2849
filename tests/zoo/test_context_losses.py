"""Losses of programs over context ranks."""

import pytest

from tests.zoo.case import judge, observe
from tests.zoo.context_losses import CASES, FAMILY, LAYOUTS


def outcomes(names, variation):
    """Cases are closures, which do not travel: by name."""
    return [observe(next(c for c in CASES if c.what == name).run, variation) for name in names]


@pytest.mark.parametrize(
    "variation", [FAMILY.variations[0], *(pytest.param(v, marks=pytest.mark.full) for v in FAMILY.variations[1:])]
)
def test_every_loss(ranks, variation):
    world = 4 if "tp" in LAYOUTS[variation][0] else 2
    seen = ranks(outcomes, [case.what for case in CASES], variation, world=world, timeout=240)
    for place, case in enumerate(CASES):
        judge(case, [rank[place] for rank in seen], variation)
