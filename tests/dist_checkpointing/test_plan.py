"""The plan, carried out in numpy over simulated ranks: whole arrays come out of every layout, bit for bit."""

from collections import Counter
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.grid import cell_of, cells
from core.dist_checkpointing.planning.plan import plan_writes, transfer_bytes
from core.parallel_state.flat import intersect, relative, slices, volume, whole
from tests.dist_checkpointing.meshes import (
    GPT_7B,
    GPT_70B,
    GPT_124M,
    SMALL,
    Mesh,
    random_arrays,
    small_cells,
)

STATES = ("main/", "exp_avg/", "exp_avg_sq/")
UNEVEN = ((0,), (1, 2), (3, 4), (5,))
VIRTUAL = ((0, 1, 4), (2, 3, 5))
HALVES = ((0, 1, 2), (3, 4, 5))
CUT = {"zero": True, "bucket": 20_000}
MESHES = {
    "one": Mesh(),
    "replicas": Mesh(dp=4),
    "zero 2": Mesh(dp=2, **CUT),
    "zero 3": Mesh(dp=3, **CUT),
    "zero 8": Mesh(dp=8, **CUT),
    "tp 2": Mesh(tp=2),
    "tp 3": Mesh(tp=3),
    "tp 4": Mesh(tp=4),
    "tp 3, zero 2": Mesh(tp=3, dp=2, **CUT),
    "uneven stages": Mesh(stages=UNEVEN),
    "virtual stages": Mesh(stages=VIRTUAL),
    "virtual stages, replicas": Mesh(dp=2, stages=VIRTUAL),
    "uneven stages, tp 2, zero 2": Mesh(tp=2, dp=2, stages=UNEVEN, **CUT),
    "stages that cut a shared embedding differently": Mesh(dp=3, stages=HALVES, **CUT),
}
SMALL_STACKS = {"norm1", "norm2", "qkv_bias", "proj_bias"}
MOVED = {"one": set(), "replicas": set(), "tp 2": {"qkv_bias"}, "tp 4": {"qkv_bias"}} | {
    "uneven stages": SMALL_STACKS,
    "virtual stages, replicas": SMALL_STACKS,
}  # where ranks hold whole cells of all else


def whole_from_ranks(arrays, holdings, plan, values):
    """What the owners have after all waves: each from its own memory and from what the sources have in theirs."""
    memory = [{key: [(box, values[key][slices(box)]) for box in held[key]] for key in held} for held in holdings]

    def read(rank, key, box):
        found = [(at, data) for at, data in memory[rank].get(key, ()) if intersect(at, box) == box]
        assert len(found) == 1, f"rank {rank} does not hold {box} of {key} in one box"
        return found[0][1][slices(relative(box, found[0][0]))]

    written = {key: np.zeros(value.shape, int) for key, value in values.items()}
    result = {key: np.zeros_like(value) for key, value in values.items()}
    owners = {(key, index): rank for rank in range(len(holdings)) for key, index, _ in plan.owned(rank)}

    def write(key, box, data):
        written[key][slices(box)] += 1
        result[key][slices(box)] = data

    for rank in range(len(holdings)):
        for key, _, cell in plan.owned(rank):
            for box, _ in memory[rank].get(key, ()):
                if (own := intersect(box, cell)) is not None:
                    write(key, own, read(rank, key, own))
    for wave in plan.waves:
        for transfer in wave:
            assert transfer.source != transfer.destination == owners[transfer.key, transfer.cell]
            write(transfer.key, transfer.box, read(transfer.source, transfer.key, transfer.box))
    assert all((count == 1).all() for count in written.values()), "every element comes once"
    return result


def check(arrays, holdings, **options):
    plan = plan_writes(arrays, holdings, **options)
    values = random_arrays(arrays)
    result = whole_from_ranks(arrays, holdings, plan, values)
    assert all(result[key].tobytes() == values[key].tobytes() for key in arrays)
    owned = [cell for rank in range(len(holdings)) for cell in plan.owned(rank)]
    expected = [(key, *cell) for key, info in sorted(arrays.items()) for cell in cells(info.shape, cell_of(info))]
    assert sorted(owned) == expected and all(plan.owned(r) == sorted(plan.owned(r)) for r in range(len(holdings)))
    return plan


@pytest.mark.parametrize("name", MESHES)
def test_every_layout_gives_the_whole(name):
    with small_cells():
        arrays = SMALL.arrays()
        plan = check(arrays, MESHES[name].holdings(SMALL))
        assert sum(map(len, plan.cells.values())) > 200
    assert name not in MOVED or {transfer.key for wave in plan.waves for transfer in wave} == MOVED[name]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_layout_gives_the_whole(data):
    layers = data.draw(st.permutations(range(6)))
    edges = sorted(data.draw(st.sets(st.integers(1, 5), max_size=3)))
    stages = tuple(tuple(layers[a:b]) for a, b in zip([0, *edges], [*edges, 6], strict=True))
    mesh = Mesh(
        tp=data.draw(st.sampled_from([1, 2, 3, 4])),
        dp=data.draw(st.integers(1, 4)),
        stages=stages,
        zero=data.draw(st.booleans()),
        bucket=data.draw(st.sampled_from([1, 30_000, 10**6])),
    )
    with small_cells():
        check(SMALL.arrays(), mesh.holdings(SMALL), wave_bytes=data.draw(st.sampled_from([1, 5_000, 10**7])))


@st.composite
def partitions(draw, box):
    """Disjoint boxes that make up `box`."""
    long = [dim for dim, (start, stop) in enumerate(box) if stop - start > 1]
    if not long or not draw(st.integers(0, 2)):
        return [box]
    dim = draw(st.sampled_from(long))
    at = draw(st.integers(box[dim][0] + 1, box[dim][1] - 1))
    first, second = ((*box[:dim], side, *box[dim + 1 :]) for side in ((box[dim][0], at), (at, box[dim][1])))
    return [*draw(partitions(first)), *draw(partitions(second))]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_holdings_give_the_whole(data):
    """Two ways to cut one array, on two sets of ranks: boxes of different ranks overlap, or are replicas."""
    shape = tuple(data.draw(st.lists(st.integers(1, 30), max_size=3)))
    arrays = {"a": ArrayInfo(shape, data.draw(st.sampled_from(["float32", "bool", "float64"])))}
    holdings = [{"a": ()} for _ in range(5)]
    for ranks in ([0, 1, 2], [3, 4]):
        for box in data.draw(partitions(whole(shape))):
            for rank in data.draw(st.sets(st.sampled_from(ranks), min_size=1)):
                holdings[rank]["a"] += (box,)
    with small_cells():
        check(arrays, holdings, wave_bytes=data.draw(st.sampled_from([1, 300, 10**6])))


def test_replicas_move_nothing_and_share_the_writing():
    arrays = {"a": ArrayInfo((8, 512, 512), "float32", stacked=True)}
    plan = plan_writes(arrays, [{"a": (whole((8, 512, 512)),)}] * 4)
    assert plan.waves == [] and [len(plan.owned(rank)) for rank in range(4)] == [2, 2, 2, 2]


def test_the_owner_is_the_least_loaded_of_those_with_half_of_the_most():
    shape = (100,)
    arrays = {name: ArrayInfo(shape, "float32") for name in ("a", "b", "c", "d")}
    first, second, rest = ((0, 50),), ((50, 75),), ((75, 100),)

    def held(*boxes):
        return [{key: (box,) for key in arrays} for box in boxes]

    assert [len(plan_writes(arrays, held(first, second, rest)).owned(rank)) for rank in range(3)] == [2, 1, 1]
    apart = {key: ArrayInfo((100 + i,), "float32") for i, key in enumerate(arrays)}  # four classes, largest first
    holdings = [{key: (((0, 50),),) for key in apart}, {key: (((50, 74),), ((74, 75),)) for key in apart}]
    holdings.append({key: (((75, info.shape[0]),),) for key, info in apart.items()})
    owners = {key: cell[0][2] for key, cell in plan_writes(apart, holdings).cells.items()}
    assert owners == {"d": 0, "c": 1, "b": 2, "a": 2}


def test_what_several_hold_is_sent_by_all_in_turn():
    arrays = {"a": ArrayInfo((4, 2**18), "float32", stacked=True)}
    left, right = ((0, 200_000),), ((200_000, 2**18),)
    holdings = [{"a": tuple(((layer, layer + 1), *left) for layer in range(4))}] * 2
    holdings += [{"a": tuple(((layer, layer + 1), *right) for layer in range(4))}] * 3
    transfers = [f for wave in plan_writes(arrays, holdings).waves for f in wave]
    assert {(f.source, f.destination) for f in transfers} == {(2, 0), (3, 1)}


def test_states_that_lie_alike_have_the_same_cells():
    with small_cells():
        arrays = SMALL.arrays(STATES)
        holdings = MESHES["uneven stages, tp 2, zero 2"].holdings(SMALL, STATES)
        plan = plan_writes(arrays, holdings)
        alone = plan_writes(SMALL.arrays(), MESHES["uneven stages, tp 2, zero 2"].holdings(SMALL))
    for name, of_name in alone.cells.items():
        places = [cell[:2] for cell in of_name]
        assert all([cell[:2] for cell in plan.cells[state + name]] == places for state in STATES)


def test_arrays_that_lie_alike_are_shared_out():
    """Layers of a foreign module are arrays of one cell each: no rank writes them all."""
    arrays = {f"layers.{i}.w": ArrayInfo((10,), "float32") for i in range(6)}
    arrays |= {"b": ArrayInfo((20,), "float32")}
    plan = plan_writes(arrays, [{key: (whole(info.shape),) for key, info in arrays.items()}] * 2)
    assert [sum(len(box) * (box[0][1] - box[0][0]) for _, _, box in plan.owned(r)) for r in (0, 1)] == [40, 40]


def traffic(wave, arrays):
    sent, received = Counter(), Counter()
    for transfer in wave:
        sent[transfer.source] += transfer_bytes(transfer.box, arrays[transfer.key])
        received[transfer.destination] += transfer_bytes(transfer.box, arrays[transfer.key])
    return max(*sent.values(), *received.values())


@pytest.mark.parametrize("wave_bytes", [17_000, 40_000])
def test_waves_are_bounded_few_and_finish_one_cell_after_the_other(wave_bytes):
    with small_cells():
        arrays = SMALL.arrays(STATES)
        holdings = MESHES["zero 8"].holdings(SMALL, STATES)
        plan = plan_writes(arrays, holdings, wave_bytes=wave_bytes)
        least = traffic([f for wave in plan.waves for f in wave], arrays) / wave_bytes
    assert all(wave == sorted(wave) and traffic(wave, arrays) <= wave_bytes for wave in plan.waves)
    assert least > 2 and len(plan.waves) <= 1.5 * least + 1
    for rank in range(8):
        at = [[(f.key, f.cell) for f in wave if f.destination == rank] for wave in plan.waves]
        for before, after in pairwise(at):
            assert not before or not after or max(before) <= min(after)


def test_a_fragment_above_the_bound_has_a_wave_of_its_own():
    arrays = {"a": ArrayInfo((8,), "float64")}
    holdings = [{"a": (((0, 4),),)}, {"a": (((4, 6),),)}, {"a": (((6, 8),),)}]
    assert [len(wave) for wave in plan_writes(arrays, holdings, wave_bytes=32).waves] == [2]
    assert [len(wave) for wave in plan_writes(arrays, holdings, wave_bytes=31).waves] == [1, 1]
    assert [len(wave) for wave in plan_writes(arrays, holdings, wave_bytes=1).waves] == [1, 1]


def test_the_plan_does_not_depend_on_the_order_of_names_or_of_boxes_of_a_replica():
    with small_cells():
        holdings = MESHES["uneven stages, tp 2, zero 2"].holdings(SMALL)
        arrays = SMALL.arrays()
        turned = [dict(reversed(held.items())) for held in holdings]
        assert plan_writes(dict(reversed(arrays.items())), turned) == plan_writes(arrays, holdings)


@pytest.mark.parametrize(
    ("holdings", "message"),
    [
        (
            [((0, 3), (0, 4))],
            r"a of shape \(5, 4\): no rank holds \(\(3, 5\), \(0, 4\)\) \(in cell c\.0\.0\)",
        ),
        ([((0, 5), (0, 2)), ((0, 4), (0, 4))], r"no rank holds \(\(4, 5\), \(2, 4\)\).*sharded state"),
        ([], r"no rank holds \(\(0, 5\), \(0, 4\)\)"),
        ([((0, 5), (0, 4)), ((2, 6), (0, 4))], r"rank 1 holds \(\(2, 6\), \(0, 4\)\) of a, .*shape \(5, 4\)"),
        ([((0, 5), (0, 4)), ((0, 5), (2, 2))], r"rank 1 holds .*empty"),
        ([((0, 5), (0, 4)), ((0, 5),)], r"rank 1 holds \(\(0, 5\),\) of a, .*not inside its shape \(5, 4\)"),
        ([((0, 5), (0, 4)), (((0, 3), (0, 4)), ((2, 5), (1, 2)))], r"rank 1 holds .*overlap"),
        ([((0, 5), (0, 4)), (((0, 5), (0, 1)), ((2, 5), (2, 4)), ((1, 3), (3, 4)))], r"rank 1 holds .*overlap"),
    ],
)
def test_refusals(holdings, message):
    several = [boxes if isinstance(boxes[0][0], tuple) else (boxes,) for boxes in holdings]
    with pytest.raises(ValueError, match=message):
        plan_writes({"a": ArrayInfo((5, 4), "float32")}, [{"a": boxes} for boxes in several] or [{}])


def test_refusals_of_names_and_of_tensors_without_dims():
    scalar = {"a": ArrayInfo((), "int64")}
    with pytest.raises(ValueError, match="rank 1 holds b, not among the 1 arrays"):
        plan_writes(scalar, [{"a": ((),)}, {"b": ((),)}])
    with pytest.raises(ValueError, match=r"no rank holds \(\)"):
        plan_writes(scalar, [{}])
    with pytest.raises(ValueError, match=r"rank 0 holds \(\) and \(\) of a, which overlap"):
        plan_writes(scalar, [{"a": ((), ())}])
    with pytest.raises(ValueError, match=r"a: dim 0 of \(0, 3\) has size 0"):
        plan_writes({"a": ArrayInfo((0, 3), "int64")}, [{}])


def figures(model, mesh):
    """(moved share of all bytes, largest writer by the mean)."""
    arrays, holdings = model.arrays(STATES), mesh.holdings(model, STATES)
    plan = plan_writes(arrays, holdings)
    bytes_of = Counter()
    for of_key in plan.cells.values():
        for _, box, owner in of_key:
            bytes_of[owner] += volume(box)
    total = sum(prod(info.shape) for info in arrays.values())
    assert bytes_of.total() == total
    moved = sum(volume(f.box) for wave in plan.waves for f in wave)
    return moved / total, max(bytes_of.values()) * len(holdings) / total


STAGES = tuple(tuple(range(20 * i, 20 * i + 20)) for i in range(4))


@pytest.mark.parametrize(
    ("model", "mesh", "moved", "balance"),
    [
        (GPT_124M, Mesh(dp=8), 0.0, 1.03),
        (GPT_124M, Mesh(dp=8, zero=True), 0.08, 1.15),
        (GPT_124M, Mesh(tp=4), 0.035, 1.2),
        (GPT_7B, Mesh(dp=8, zero=True), 0.23, 1.2),
        (GPT_7B, Mesh(tp=8, dp=8, zero=True), 0.14, 1.35),
        pytest.param(GPT_70B, Mesh(tp=8, dp=8), 0.0, 1.03, marks=pytest.mark.full),
        pytest.param(GPT_70B, Mesh(tp=8, dp=8, stages=STAGES, zero=True), 0.16, 1.15, marks=pytest.mark.full),
    ],
)
def test_real_models_move_little_and_write_evenly(model, mesh, moved, balance):
    found, largest = figures(model, mesh)
    assert found <= moved and largest <= balance
    assert (found > 0) == (moved > 0)
