"""Losses of programs over context ranks, and what they make of their batches."""

import pytest

from tests.marks import PRODUCT
from tests.zoo import (
    context_batches,
    context_hooks,
    context_labels,
    context_losses,
    context_means,
    context_teachers,
    context_vocabulary,
    context_wholes,
)
from tests.zoo.case import judge, observe

FAMILIES = {
    "losses": context_losses,
    "batches": context_batches,
    "hooks": context_hooks,
    "labels": context_labels,
    "vocabulary": context_vocabulary,
    "wholes": context_wholes,
    "means": context_means,
    "teachers": context_teachers,
}


HALVES = {"2 context ranks, ZeRO-1": slice(0, None, 2), "2 context ranks, ZeRO-3": slice(1, None, 2)}


def outcomes(family, names, variation):
    """Cases are closures, which do not travel: by name."""
    return [observe(next(c for c in FAMILIES[family].CASES if c.what == name).run, variation) for name in names]


@pytest.mark.parametrize(
    "variation",
    [
        pytest.param(variation, marks=[pytest.mark.full] if place else [])
        for place, variation in enumerate(context_losses.LAYOUTS)
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_loss(ranks, family, variation):
    """Each on two of three layouts: of those without tensor ranks, every other one."""
    check(ranks, family, FAMILIES[family].CASES[HALVES.get(variation, slice(None))], variation)


@pytest.mark.parametrize("variation", [pytest.param(variation, marks=PRODUCT) for variation in HALVES])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_loss_on_every_layout(ranks, family, variation):
    check(ranks, family, FAMILIES[family].CASES, variation)


def check(ranks, family, cases, variation):
    world = 4 if "tp" in context_losses.LAYOUTS[variation][0] else 2
    seen = ranks(outcomes, family, [case.what for case in cases], variation, world=world, timeout=240)
    for place, case in enumerate(cases):
        judge(case, [rank[place] for rank in seen], variation)
