"""Every habit at every ZeRO stage: a few jobs for the pool, many cases in each."""

import pytest

from tests.marks import FULL, thinned
from tests.zoo import habits_again
from tests.zoo.case import judge, observe
from tests.zoo.habits import FAMILY


def seen(zero, names):
    """what -> what this rank saw."""
    return {case.what: observe(case.run, zero) for case in FAMILY.cases if case.what in names}


def check(ranks, zero, cases):
    found = ranks(seen, zero, [case.what for case in cases], world=2, timeout=240)
    wrong = []
    for case in cases:
        try:
            judge(case, [one[case.what] for one in found], zero)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_few_habits(ranks, zero):
    check(ranks, zero, FAMILY.cases[::4])


@pytest.mark.parametrize("zero", thinned(FAMILY.variations, 3, [FULL]))
def test_habits(ranks, zero):
    check(ranks, zero, FAMILY.cases)


@pytest.mark.parametrize("zero", [0, 3])
def test_backward_calls_that_add_to_sums_in_one_process(ranks, zero):
    cases = [case for case in habits_again.HABITS if case.outcome == "right"]
    (found,) = ranks(seen, zero, [case.what for case in cases], world=1)
    assert {what: one.message for what, one in found.items() if one.outcome != "right"} == {}
