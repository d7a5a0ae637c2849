"""Parts of a program's own in the layers of a model whose sequences ranks share."""

import pytest

from tests.zoo.case import judge, observe
from tests.zoo.own_parts import CASES, FAMILY


def outcomes(names, variation):
    """Cases are closures, which do not travel: by name."""
    return [observe(next(c for c in CASES if c.what == name).run, variation) for name in names]


@pytest.mark.parametrize(
    "variation",
    [FAMILY.variations[0], *(pytest.param(v, marks=pytest.mark.full) for v in FAMILY.variations[1:])],
    ids=str,
)
def test_every_part(ranks, variation):
    seen = ranks(outcomes, [case.what for case in CASES], variation, world=2, timeout=240)
    for place, case in enumerate(CASES):
        judge(case, [rank[place] for rank in seen], variation)
