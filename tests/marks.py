"""How much of a product of options runs where: `make test`, `make test-full` (every landing), `make test-product`."""

import pytest
import torch

FULL = pytest.mark.full

# a recomputed region under torch's own hooks for saved tensors keeps more there (docs/status.md)
NOT_ON_2_11 = pytest.mark.xfail(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12),
    reason="torch 2.11 saves what it recomputes",
    strict=True,
)

# what takes hours in all; beside `full`, so that `-m "not full"` is what `make test` runs
PRODUCT = (pytest.mark.full, pytest.mark.product)


def parts(cases, every, name="a part"):
    """All of a product that is one test's: each `every`-th case in `make test-full`, all in `make test-product`.

    `every` has no factor in common with the number of values of an option, so that all values of each are met.
    """
    return [pytest.param(cases[::every], id=name, marks=FULL), pytest.param(cases, id="all", marks=PRODUCT)]


def thinned(cases, every, marks=()):
    """Each `every`-th of these with `marks`; the others run in `make test-product`."""
    found = []
    for number, case in enumerate(cases):
        here = marks if number % every == 0 else PRODUCT
        named = hasattr(case, "values") and hasattr(case, "id")  # pytest.param is a tuple too
        values = case.values if named else case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, id=case.id if named else None, marks=here))
    return found
