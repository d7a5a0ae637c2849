"""What thousands of ranks tell each other of a 70B model with main parameters and moments: integers only."""

import json

import pytest

from core.dist_checkpointing.planning.plan import plan_writes
from core.dist_checkpointing.state.catalog import (
    fingerprint,
    merge_catalogs,
    to_json,
    with_repeated_arrays,
    without_repeated_arrays,
)
from tests.dist_checkpointing.meshes import GPT_70B, SMALL, Mesh, small_cells
from tests.marks import PRODUCT

STATES = ("model/decoder.layers.", "optimizer/main/decoder.layers.", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")


def mesh(tp, pp, dp, layers=80):
    return Mesh(
        tp=tp,
        dp=dp,
        stages=tuple(tuple(range(layers * p // pp, layers * (p + 1) // pp)) for p in range(pp)),
        zero=True,
    )


def catalogue(model, layout):
    """(what every rank tells, arrays, what every rank holds)."""
    arrays, holdings = model.arrays(STATES), layout.holdings(model, STATES)
    local = [to_json({key: arrays[key] for key in held}, held) for held in holdings]
    kinds = [fingerprint(one["arrays"]) for one in local]
    return [without_repeated_arrays(one, rank, kinds) for rank, one in enumerate(local)], kinds, arrays, holdings


@pytest.mark.parametrize(
    "layout",
    [
        mesh(8, 4, 32),
        pytest.param(mesh(8, 16, 32), marks=pytest.mark.full),
        pytest.param(mesh(8, 4, 128), marks=PRODUCT),
        pytest.param(mesh(8, 16, 128), marks=PRODUCT),
    ],
    ids=lambda layout: f"{layout.size()}-{layout.dp}",
)
def test_what_each_rank_tells_is_small(layout):
    """Where its parts lie, once for a weight and its states; what the arrays are, only the first that has them."""
    told, kinds, arrays, holdings = catalogue(GPT_70B, layout)
    sizes = [len(json.dumps(one)) for one in told]
    assert max(sizes) <= 8000
    assert sum("arrays" in one for one in told) == len(set(kinds)) < len(told) / 8
    found = merge_catalogs(json.loads(json.dumps(with_repeated_arrays(told, kinds))))
    assert found.arrays == arrays and found.holdings == holdings


def test_the_plan_of_what_was_told_is_the_plan():
    with small_cells():
        told, kinds, arrays, holdings = catalogue(SMALL, mesh(2, 2, 3, layers=6))
        found = merge_catalogs(json.loads(json.dumps(with_repeated_arrays(told, kinds))))
        assert plan_writes(found.arrays, found.holdings) == plan_writes(arrays, holdings)
