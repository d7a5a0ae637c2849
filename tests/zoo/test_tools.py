"""torch's tools on one tensor rank, on two, and on two with sequence parallelism."""

import pytest

from tests.marks import thinned
from tests.zoo.case import judge, observe
from tests.zoo.split_model import LAYOUTS
from tests.zoo.tools import CASES, FAMILY


def outcomes(names, variation):
    """Cases are closures, which do not travel: by name."""
    return [observe(next(c for c in CASES if c.what == name).run, variation) for name in names]


def hold(ranks, cases, variation):
    seen = ranks(outcomes, [case.what for case in cases], variation, world=LAYOUTS[variation][0], timeout=240)
    for place, case in enumerate(cases):
        judge(case, [rank[place] for rank in seen], variation)


def _name(value):
    return value if isinstance(value, str) else value.what


@pytest.mark.parametrize("variation", FAMILY.variations, ids=str)
@pytest.mark.parametrize("part", range(4))
def test_some(ranks, part, variation):
    """Every fourth; compiling takes as long as all the others (tests/autograd/test_compile_layers.py always runs)."""
    quick = [case for case in CASES if "torch.compile" not in case.what]
    hold(ranks, quick[part::16], variation)


@pytest.mark.full
@pytest.mark.parametrize(
    "case, variation", thinned([(c, v) for v in FAMILY.variations for c in CASES], every=2), ids=_name
)
def test_all(ranks, case, variation):
    hold(ranks, [case], variation)
