"""Other people's modules under schedules and recomputation: right, told or refused, each."""

import pytest
import torch

from tests.marks import thinned
from tests.zoo.case import judge, observe
from tests.zoo.modules import FAMILY, VARIATIONS, seen_apart

COVER = [  # importing transformers takes as long as all of these
    (case, VARIATIONS[i % len(VARIATIONS)]) for i, case in enumerate(FAMILY.cases) if "Hugging Face" not in case.what
]
REST = thinned([(case, v) for case in FAMILY.cases for v in VARIATIONS if (case, v) not in COVER], every=5)


@pytest.fixture(autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
    torch._dynamo.reset()


def _name(value):
    return value if isinstance(value, str) else value.what


@pytest.mark.parametrize(("case", "variation"), COVER, ids=_name)
def test_a_cover(case, variation):
    judge(case, [observe(case.run, variation)], variation)


@pytest.mark.full
@pytest.mark.parametrize(("case", "variation"), REST, ids=_name)
def test_all(case, variation):
    judge(case, [observe(case.run, variation)], variation)


APART = [  # right everywhere, with and without recomputation
    case.what
    for case in FAMILY.cases
    if case.outcome == "right" and not (case.elsewhere or "Hugging Face" in case.what or "compile" in case.what)
]


@pytest.mark.parametrize(
    ("names", "policies"),
    [
        (APART[::9], ["none"]),
        pytest.param(APART, ["none", "layer", "stage"], marks=pytest.mark.full),
    ],
)
def test_apart(ranks, names, policies):
    assert ranks(seen_apart, names, policies, world=2, timeout=240) == [{}, {}]
