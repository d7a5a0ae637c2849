"""How much of a product of options runs where: `make test`, `make test-full` (every landing), `make test-product`."""

import pytest

# what takes hours in all; beside `full`, so that `-m "not full"` is what `make test` runs
PRODUCT = (pytest.mark.full, pytest.mark.product)


def thinned(cases, every, marks=()):
    """Each `every`-th of these with `marks`; the others run in `make test-product`."""
    found = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=marks if number % every == 0 else PRODUCT))
    return found
