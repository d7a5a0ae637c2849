"""Who reads what for whom, as integers: every rank gets all it wants, and no checksum's bytes are read twice."""

import json
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.dist_checkpointing.format.grid import cell_of, cells, inner_shape
from core.dist_checkpointing.format.zarr_metadata import Chunking
from core.dist_checkpointing.planning.plan import padded_bytes
from core.dist_checkpointing.planning.read_plan import from_json, plan_reads, to_json
from core.parallel_state.flat import intersect, slices, volume
from tests.dist_checkpointing.meshes import GPT_70B, GPT_124M, SMALL, Mesh, small_cells
from tests.dist_checkpointing.test_plan import MESHES, STATES
from tests.dist_checkpointing.test_thousands import mesh


def chunks_of(arrays):
    def one(info):
        cell = cell_of(info)
        return Chunking(info.shape, info.dtype, cell, inner_shape(cell))

    return {key: one(info) for key, info in arrays.items()}


def wants(model, layout, states=STATES):
    """What a training run loads: its part of each state, and its weights from the main parameters."""
    weights = replace(layout, zero=False).holdings(model, states[:1])
    found = []
    for held, whole in zip(layout.holdings(model, states), weights, strict=True):
        found.append({**held, **{key: held.get(key, ()) + boxes for key, boxes in whole.items()}})
    return found


def told(wanted):
    return [from_json(json.loads(json.dumps(to_json(one)))) for one in wanted]


def units_read(chunks, wanted, plan):
    """(key, unit) -> how often it is read, by all ranks; rank -> bytes. One reading reads a unit once."""
    counts, bytes_of = Counter(), Counter()

    def read(rank, key, boxes):
        at = chunks[key]
        units = {unit for box in boxes for unit, _ in cells(at.shape, at.unit, box)}
        counts.update((key, unit) for unit in units)
        bytes_of[rank] += len(units) * at.unit_bytes

    alone = defaultdict(list)
    for (key, _), boxes in plan.alone.items():
        for box, rank in boxes:
            alone[rank, key].append(box)
    for rank, held in enumerate(wanted):
        for key, boxes in held.items():
            shared = plan.shared.get(key, ())
            own = [
                intersect(box, cell)
                for box in boxes
                for index, cell in cells(chunks[key].shape, chunks[key].cell, box)
                if index not in shared
            ]
            read(rank, key, own + alone[rank, key])
    for readings in plan.rounds.values():
        for one in readings:
            read(one.reader, one.key, [one.box])
    return counts, bytes_of


def assert_everybody_gets_all(chunks, wanted, plan):
    """Each element that a rank wants in a shared cell: from a reading that covers it, or by itself."""
    found = defaultdict(lambda: defaultdict(list))
    for readings in plan.rounds.values():
        for one in readings:
            assert len({rank for _, ranks in one.deliveries for rank in ranks}) > 1
            assert any(one.reader in ranks for _, ranks in one.deliveries)
            for box, ranks in one.deliveries:
                assert intersect(box, one.box) == box
                for rank in ranks:
                    found[rank][one.key, one.cell].append(box)
    for (key, index), boxes in plan.alone.items():
        for box, rank in boxes:
            found[rank][key, index].append(box)
    for rank, held in enumerate(wanted):
        for key, boxes in held.items():
            got = np.zeros(chunks[key].shape, bool)
            for index, cell in cells(chunks[key].shape, chunks[key].cell):
                parts = found[rank][key, index] if index in plan.shared.get(key, ()) else [cell]
                for part in parts:
                    got[slices(part)] = True
            assert all(got[slices(box)].all() for box in boxes), (rank, key)


def moved(chunks, plan):
    """Per (round, rank): bytes read or sent, and received."""
    sent, received = Counter(), Counter()
    for number, readings in plan.rounds.items():
        for one in readings:
            itemsize = chunks[one.key].itemsize
            out = 0
            for box, ranks in one.deliveries:
                for rank in ranks:
                    if rank != one.reader:
                        received[number, rank] += padded_bytes(box, itemsize)
                        out += padded_bytes(box, itemsize)
            sent[number, one.reader] += max(out, volume(one.box) * itemsize)
    return sent, received


COVER = {"one", "replicas", "zero 8", "uneven stages", "stages that cut a shared embedding differently"}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(m, id=name, marks=[] if name in COVER else pytest.mark.full) for name, m in MESHES.items()],
)
def test_no_byte_is_read_twice_and_all_arrive(layout):
    with small_cells():
        arrays = SMALL.arrays(STATES)
        chunks, wanted = chunks_of(arrays), wants(SMALL, layout)
        plan = plan_reads(chunks, told(wanted), round_bytes=2**15)
        counts, _ = units_read(chunks, told(wanted), plan)
        assert set(counts.values()) == {1}
        assert_everybody_gets_all(chunks, wanted, plan)
        assert bool(plan.rounds) == (layout.size() > 1)
        for side in moved(chunks, plan):
            assert max(side.values(), default=0) <= 2**15
        for rank in {0, layout.size() - 1}:  # what concerns one, in the rounds of all
            mine = plan_reads(chunks, told(wanted), rank, round_bytes=2**15)
            assert mine.count == plan.count == max(plan.rounds, default=-1) + 1
            for number in range(plan.count):
                for_me = [one for one in plan.rounds.get(number, []) if any(rank in r for _, r in one.deliveries)]
                assert mine.rounds.get(number, []) == for_me


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_boxes(data):
    """Ranks that want different, overlapping, or no parts."""
    with small_cells():
        arrays = {"a": SMALL.arrays()["qkv"], "b": SMALL.arrays()["norm"]}
        chunks = chunks_of(arrays)

        def box(shape):
            starts = [data.draw(st.integers(0, n - 1)) for n in shape]
            return tuple((a, data.draw(st.integers(a + 1, n))) for a, n in zip(starts, shape, strict=True))

        wanted = []
        for _ in range(data.draw(st.integers(1, 4))):
            keys = data.draw(st.sets(st.sampled_from(["a", "b"])))
            wanted.append({k: tuple(box(arrays[k].shape) for _ in range(data.draw(st.integers(1, 2)))) for k in keys})
        limit = data.draw(st.sampled_from([1, 2**13, 2**20]))
        plan = plan_reads(chunks, told(wanted), round_bytes=limit)
        assert_everybody_gets_all(chunks, wanted, plan)
        counts, _ = units_read(chunks, told(wanted), plan)
        assert set(counts.values()) <= {1}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dp", [4, 8])
def test_replicas_share_the_reading_evenly(dp, zero):
    """A model of 124M parameters with its optimizer: the state once, an equal share on each rank."""
    layout = Mesh(dp=dp, zero=zero)
    chunks, wanted = chunks_of(GPT_124M.arrays(STATES)), told(wants(GPT_124M, layout))
    plan = plan_reads(chunks, wanted)
    counts, bytes_of = units_read(chunks, wanted, plan)
    total = sum(bytes_of.values())
    assert set(counts.values()) == {1}
    state = sum(volume(tuple((0, n) for n in at.shape)) * at.itemsize for at in chunks.values())
    assert total <= 1.01 * state  # the vocabulary's last cell is stored in full size
    assert max(bytes_of.values()) <= 1.05 * total / dp
    for side in moved(chunks, plan):
        assert max(side.values()) <= 64 << 20
    received = sum(moved(chunks, plan)[1].values())
    assert plan.count <= 1.7 * received / dp / (64 << 20) + 3, "rounds are full"


def test_a_part_for_many_goes_to_all_in_one_round():
    """More replicas than fit beside one piece: rounds stay full."""
    info = SMALL.arrays()["up"]
    with small_cells():
        chunks = chunks_of({"w": info})
        wanted = [{"w": (tuple((0, n) for n in info.shape),)}] * 100
        unit = chunks["w"].unit_bytes
        plan = plan_reads(chunks, wanted, round_bytes=4 * unit)
        assert {volume(one.box) * 4 for readings in plan.rounds.values() for one in readings} == {unit}
        assert plan.count <= sum(map(len, plan.rounds.values())) / 4 + 1


@pytest.mark.full
def test_the_plan_of_a_thousand_ranks():
    """70B as TP 8, PP 4, DP 32: each rank reads its share, and keeps what concerns it only."""
    layout = mesh(8, 4, 32)
    arrays, wanted = GPT_70B.arrays(STATES), wants(GPT_70B, layout)
    text = [json.dumps(to_json(one)) for one in wanted]
    assert max(map(len, text)) <= 8000
    chunks, wanted = chunks_of(arrays), [from_json(json.loads(one)) for one in text]
    plan = plan_reads(chunks, wanted)
    read = Counter()
    for readings in plan.rounds.values():
        for one in readings:
            read[one.reader] += volume(one.box) * 4
    for boxes in plan.alone.values():
        for box, rank in boxes:
            read[rank] += volume(box) * 4
    state = sum(volume(tuple((0, n) for n in at.shape)) * 4 for at in chunks.values())
    assert 0.95 * state < sum(read.values()) <= 1.001 * state
    assert max(read.values()) <= 1.5 * state / 1024
    assert plan.count <= 200
    assert sum(map(len, plan_reads(chunks, wanted, 5).rounds.values())) < 6000
