"""The exchange on real ranks: every cell once, with every bit; views where nothing has to move."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.grid import cell_of, cells
from core.dist_checkpointing.planning.exchange import gather_json, owned_cells
from core.dist_checkpointing.planning.plan import plan_writes
from core.parallel_state.collectives.failure import Unanswered
from core.parallel_state.flat import slices, whole
from tests.dist_checkpointing.meshes import SMALL, Mesh, random_arrays, small_cells
from tests.states import state

CUT = {"zero": True, "bucket": 20_000}
DTYPES = ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
DTYPES += ["int64", "int32", "int16", "int8", "uint8", "bool"]


def parts_of(arrays, held):
    """This rank's parts with other strides than an array's own, and only its own: of some, parameters."""
    values = random_arrays(arrays)
    parts = {}
    for key, boxes in held.items():
        dtype = getattr(torch, arrays[key].dtype)
        parts[key] = []
        for i, box in enumerate(boxes):
            data = torch.from_numpy(np.array(values[key][slices(box)]).view(f"i{arrays[key].itemsize}")).view(dtype)
            if i % 2:
                backwards = tuple(range(data.dim()))[::-1]
                data = data.permute(backwards).contiguous().permute(backwards)
            parts[key].append(SimpleNamespace(box=box, data=data.requires_grad_(data.is_floating_point())))
    return parts


def save(arrays, holdings, wave_bytes):
    """On each rank: the cells that it would write, as bytes; its calls; the number of waves."""
    ps = state()
    with small_cells():
        plan = plan_writes(arrays, holdings, wave_bytes=wave_bytes)
    calls = ps.world.traffic.calls if ps.world else 0
    yielded = owned_cells(plan, arrays, parts_of(arrays, holdings[ps.rank]), ps.rank, ps.world, ps.device)
    found = {(key, index): (str(cell.dtype), cell.shape, cell.tobytes()) for key, index, _, cell in yielded}
    return found, (ps.world.traffic.calls if ps.world else 0) - calls, len(plan.waves)


def check(results, arrays):
    values = random_arrays(arrays)
    with small_cells():
        for key, info in arrays.items():
            for index, box in cells(info.shape, cell_of(info)):
                writers = [found for found, _, _ in results if (key, index) in found]
                expected = values[key][slices(box)]
                assert len(writers) == 1
                assert writers[0].pop((key, index)) == (str(expected.dtype), expected.shape, expected.tobytes())
    assert not any(found for found, _, _ in results)
    assert all(calls == waves for _, calls, waves in results)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(),
        Mesh(tp=3),
        Mesh(dp=2, stages=((0, 1, 4), (2, 3, 5)), **CUT),
        Mesh(tp=2, dp=2, **CUT),
        Mesh(stages=((0,), (1, 2), (3, 4), (5,))),
    ],
    ids=str,
)
def test_every_cell_comes_whole_from_one_rank(ranks, mesh):
    arrays = SMALL.arrays(("main/",)) | SMALL.arrays(("model/",), "bfloat16")
    holdings = mesh.holdings(SMALL, ("main/", "model/"))
    results = ranks(save, world=mesh.size(), arrays=arrays, holdings=holdings, wave_bytes=30_000)
    check(results, arrays)
    assert mesh.size() == 1 or results[0][2] >= 1


def test_every_dtype_travels_as_its_bits(ranks):
    """Odd sizes, so that transfers would not start where their dtype may; NaNs with payloads; no dims at all."""
    arrays = {dtype: ArrayInfo((7, 9), dtype) for dtype in DTYPES}
    arrays |= {f"{dtype} scalar": ArrayInfo((), dtype) for dtype in DTYPES}
    holdings = [{}, {}, {}]
    for i, dtype in enumerate(DTYPES):
        cut = 1 + i % 6
        holdings[0][dtype] = (((0, cut), (0, 9)), ((cut, 7), (0, 2)))
        holdings[1][dtype] = (((cut, 7), (2, 9)),)
        holdings[i % 3][f"{dtype} scalar"] = ((),)
    for wave_bytes in (1, 64 << 20):  # rank 2 has nothing to send or to receive, and takes part
        results = ranks(save, world=3, arrays=arrays, holdings=holdings, wave_bytes=wave_bytes)
        assert results[0][2] >= 6 if wave_bytes == 1 else results[0][2] == 1
        check(results, arrays)


def play(arrays, parts, held=None):
    plan = plan_writes(arrays, [held or {key: tuple(p.box for p in of_key) for key, of_key in parts.items()}])
    return list(owned_cells(plan, arrays, parts, 0, None))


def test_a_cell_within_one_part_is_its_memory():
    arrays = {"a": ArrayInfo((3, 512, 1024), "bfloat16", stacked=True)}
    data = torch.randn(1024, 3, 512).to(torch.bfloat16).permute(1, 2, 0)
    (_, _, _, first), *rest = play(arrays, {"a": [SimpleNamespace(box=whole((3, 512, 1024)), data=data)]})
    assert len(rest) == 2 and first.dtype == np.uint16 and first.shape == (1, 512, 1024)
    assert np.shares_memory(first, data.view(torch.int16).numpy())
    data.zero_()
    assert not first.any()


def test_a_cell_of_several_parts_is_the_callers():
    arrays = {"a": ArrayInfo((4,), "float32")}
    parts = [SimpleNamespace(box=((i, i + 2),), data=torch.tensor([i, i + 1.0])) for i in (0, 2)]
    ((key, index, box, cell),) = play(arrays, {"a": parts})
    assert (key, index, box, cell.tolist()) == ("a", (0,), ((0, 4),), [0.0, 1.0, 2.0, 3.0])
    assert not any(np.shares_memory(cell, part.data.numpy()) for part in parts)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_parts_on_an_accelerator_come_to_the_cpu():
    arrays = {"a": ArrayInfo((4, 6), "bfloat16"), "b": ArrayInfo((4,), "float32")}
    device = torch.accelerator.current_accelerator()
    a, b = torch.randn(6, 4, device=device).to(torch.bfloat16).T, torch.randn(4, device=device)
    parts = {"a": [SimpleNamespace(box=whole((4, 6)), data=a)]}
    parts["b"] = [SimpleNamespace(box=((i, i + 2),), data=b[i : i + 2]) for i in (0, 2)]
    first, second = (cell for *_, cell in play(arrays, parts))
    assert first.tobytes() == a.cpu().contiguous().view(torch.int16).numpy().tobytes()
    assert second.tobytes() == b.cpu().numpy().tobytes()


def test_parts_that_are_not_what_was_planned_are_refused():
    arrays = {"a": ArrayInfo((4,), "float32")}
    box, data = ((0, 4),), torch.zeros(4)
    with pytest.raises(ValueError, match=r"of a is float64 \(4,\); its array and box say float32 \(4,\)"):
        play(arrays, {"a": [SimpleNamespace(box=box, data=data.double())]})
    with pytest.raises(ValueError, match=r"of a is float32 \(3,\); its array and box say float32 \(4,\)"):
        play(arrays, {"a": [SimpleNamespace(box=box, data=data[:3])]})
    with pytest.raises(ValueError, match=r"a: 1 of the 4 elements of \(\(0, 4\),\) are in no part"):
        play(arrays, {"a": [SimpleNamespace(box=((0, 3),), data=data[:3])]}, {"a": (box,)})
    plan = plan_writes(arrays, [{"a": (((0, 3),),)}, {"a": (((3, 4),),)}])
    with pytest.raises(ValueError, match="1 transfers between ranks; pass the group"):
        list(owned_cells(plan, arrays, {"a": [SimpleNamespace(box=((0, 3),), data=data[:3])]}, 0, None))


def lacking():
    ps = state()
    arrays, cut = {"a": ArrayInfo((6,), "float32")}, (((0, 4),), ((4, 6),))
    plan = plan_writes(arrays, [{"a": (box,)} for box in cut])
    box = ((0, 3),) if ps.rank == 0 else cut[1]
    parts = {"a": [SimpleNamespace(box=box, data=torch.zeros(box[0][1] - box[0][0], dtype=torch.float32))]}
    try:
        return list(owned_cells(plan, arrays, parts, ps.rank, ps.world))
    except ValueError as error:
        return str(error)


def test_a_cell_that_stays_incomplete_is_an_error(ranks):
    error, nothing = ranks(lacking, world=2)
    assert "a: 1 of the 6 elements of ((0, 6),) are in no part" in error and nothing == []


def gather(values):
    ps = state()
    return gather_json(values[ps.rank], ps.world, ps.device)


def test_json_of_every_rank(ranks):
    values = [{"ä": [1, None, 2.5]}, "", list(range(1000))]
    assert ranks(gather, world=3, values=values) == [values] * 3
    assert gather_json({"a": (1, 2)}, None) == [{"a": [1, 2]}]


def test_a_rank_that_saves_or_loads_alone_is_told_that_all_ranks_do(monkeypatch):
    """`if rank == 0: save(...)`: the exchange that it waits in, as its transport ends the wait."""

    def in_vain(x, group):
        raise Unanswered("rank 0 waited in vain for rank 1 at an exchange of parts", (1,))

    monkeypatch.setattr("core.dist_checkpointing.planning.exchange.all_gather", in_vain)
    with pytest.raises(Unanswered, match=r"in vain .*call save and load on every rank, not inside `if rank") as told:
        gather_json({"x": 1}, SimpleNamespace(gloo=("cpu",)))
    assert told.value.ranks == (1,)
