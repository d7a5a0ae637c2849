"""DTensors and FSDP2's state dicts: boxes by arithmetic, saved and loaded under other meshes, bit for bit."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from core.dist_checkpointing import load, load_plain_tensors, save
from core.dist_checkpointing.state.dtensor import local_intervals
from core.dist_checkpointing.state.mapping import sharded_state_dict
from core.dist_checkpointing.writing.saving import Saver
from tests.dist_checkpointing import small
from tests.states import state as parallel


def placed(kind, dim=0, factor=1):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return {"R": Replicate, "S": lambda: Shard(dim), "T": lambda: _StridedShard(dim, split_factor=factor)}[kind]()


def held(whole, placements, mesh, at):
    """What torch itself gives to a rank."""
    for placement, count, rank in zip(placements, mesh, at, strict=True):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, count, with_padding=False, contiguous=True)[0][rank]
    return whole.clone()


@pytest.mark.parametrize("n", [0, 1, 3, 7, 8, 13])
@pytest.mark.parametrize("mesh", [(1, 4), (2, 2), (3, 2), (2, 5)])
def test_intervals_are_torchs(n, mesh):
    """Uneven parts, ranks with nothing, one dim cut twice, from the left and from the right."""
    for kinds in product("RST", repeat=2):
        placements = [placed(kind, factor=mesh[1]) for kind in kinds]
        for at in product(*map(range, mesh)):
            (intervals,) = local_intervals((n,), placements, mesh, at)
            found = [i for a, b in intervals for i in range(a, b)]
            assert found == held(torch.arange(n), placements, mesh, at).tolist()


def test_what_has_no_box():
    partial = SimpleNamespace(is_partial=lambda: True)
    with pytest.raises(ValueError, match=r"to be added up first; give tensor.redistribute"):
        local_intervals((4,), [partial], (2,), (0,))
    novel = SimpleNamespace(is_partial=lambda: False, is_replicate=lambda: False)
    with pytest.raises(ValueError, match="which is unknown here"):
        local_intervals((4,), [novel], (2,), (0,))


WHOLES = {
    "w": small.whole("w", (7, 5), 0),
    "wide": small.whole("wide", (3, 9), 0, torch.bfloat16),
    "z": torch.complex(*small.whole("z", (2, 5, 3), 0).double()),
    "count": torch.tensor(3),
}


def spread(ps, wholes):
    """The same tensors on this mesh, each placed in its own way."""
    from torch.distributed.tensor import DTensor

    mesh = ps.mesh_for("dp", "tp")
    at = mesh.get_coordinate()
    ways = {
        "w": [placed("T", 0, mesh.shape[1]), placed("S", 0)],
        "wide": [placed("S", 1), placed("S", 0)],
        "z": [placed("S", 0), placed("S", 0)],
        "count": [placed("R"), placed("R")],
    }
    return {
        name: DTensor.from_local(
            held(t, ways[name], mesh.shape, at), mesh, ways[name], run_check=False, shape=t.shape, stride=t.stride()
        )
        for name, t in wholes.items()
    }


def save_spread(root, name, tp):
    ps = parallel(tp=tp)
    Saver(root, ps, durable=False).save(name, {"model": spread(ps, WHOLES)})


def load_spread(root, names, tp):
    ps = parallel(tp=tp)
    for name in names:
        empty = spread(ps, {name: torch.zeros_like(t) for name, t in WHOLES.items()})
        local = {name: t.to_local() for name, t in empty.items()}
        state = load({"model": empty}, f"{root}/{name}", ps=ps)["model"]
        expected = spread(ps, WHOLES)
        for key, tensor in local.items():
            assert torch.equal(tensor, expected[key].to_local()), (name, key)
            assert state[key] is empty[key]


LAYOUTS = {1: (1, 1), 2: (2, 1), 22: (2, 2), 4: (4, 2), 44: (4, 4)}  # name -> world, tp


def test_any_mesh_from_any_mesh(ranks, tmp_path, single):
    """World sizes 1, 2 and 4, one and two axes: the files are the same, so what one writes all read."""
    Saver(str(tmp_path), single, durable=False).save("plain", {"model": WHOLES})
    for name, (world, tp) in LAYOUTS.items():
        ranks(save_spread, str(tmp_path), str(name), tp, world=world)
    files = {name: contents(tmp_path / name) for name in ["plain", *map(str, LAYOUTS)]}
    assert all(found == files["plain"] for found in files.values())
    for world, tp in LAYOUTS.values():
        ranks(load_spread, str(tmp_path), ["plain", "4"], tp, world=world)
    found = load_plain_tensors(tmp_path / "4")
    assert all(torch.equal(found[f"model/{name}"], t) for name, t in WHOLES.items())


def contents(folder):
    """Of every file that does not tell who wrote it."""
    paths = (p for p in Path(folder).rglob("*") if p.is_file() and p.parent.name != "receipts")
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.name != "manifest.json"}


def module(seed):
    torch.manual_seed(seed)
    kind = {"dtype": torch.float32}
    return nn.Sequential(nn.Linear(3, 7, **kind), nn.BatchNorm1d(7, **kind), nn.Linear(7, 1, **kind))


def fully_sharded(seed, ps):
    """FSDP2, over tensor parallelism where there is any: 7 rows, and 1, over 2 or 4 ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    made, mesh = module(seed), ps.mesh_for("dp", "tp")
    if ps.sizes["tp"] > 1:
        parallelize_module(made, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(made, mesh=mesh["dp"])


def save_fsdp(root, tp):
    ps = parallel(tp=tp)
    save({"model": fully_sharded(1, ps).state_dict()}, root, ps=ps)


def load_fsdp(root, tp):
    """By torch's state dict and by ours, which name the same."""
    ps = parallel(tp=tp)
    for of in (lambda model: model.state_dict(), lambda model: sharded_state_dict(model, ps)):
        model, expected = fully_sharded(2, ps), fully_sharded(1, ps).state_dict()
        model.load_state_dict(load({"model": of(model)}, root, ps=ps)["model"])
        for name, value in model.state_dict().items():
            local = [t.to_local() if hasattr(t, "to_local") else t for t in (value, expected[name])]
            assert torch.equal(*local), name


@pytest.mark.parametrize("written", [(1, 1), (2, 1), (4, 2)])
def test_fully_shard(ranks, tmp_path, single, written):
    world, tp = written
    ranks(save_fsdp, str(tmp_path / "x"), tp, world=world)
    for world, tp in ((1, 1), (2, 1), (4, 2), (4, 1)):
        ranks(load_fsdp, str(tmp_path / "x"), tp, world=world)
    plain, expected = module(2), module(1).state_dict()
    load({"model": plain.state_dict()}, tmp_path / "x", ps=single)
    assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())


def refused(root):
    from torch.distributed.tensor import DTensor, Partial, distribute_tensor

    ps = parallel(tp=2)
    mesh, saver = ps.mesh_for("dp", "tp"), Saver(root, ps, durable=False)
    sums = DTensor.from_local(torch.ones(2), mesh, [Partial(), placed("R")], run_check=False)
    with pytest.raises(ValueError, match=r"w is a DTensor, of .*: its parts are to be added up first"):
        saver.prepare({"w": sums})
    rows = [placed("S"), placed("S")]  # of 10: 3, 2, 3, 2
    odd = DTensor.from_local(torch.ones(2), mesh, rows, run_check=False, shape=torch.Size([10]), stride=(1,))
    with pytest.raises(ValueError, match=r"w is a DTensor of shape \[10\], .*, but \[2\] is here"):
        saver.prepare({"w": odd})
    rows = torch.arange(4) + 100 * ps.coordinate["tp"]  # each tensor rank has a replica of its own, of other values
    with pytest.raises(ValueError, match=r"w at \[\(0, 2\)\] differs between rank 0 and rank 1"):
        saver.prepare({"w": distribute_tensor(rows, ps.mesh_for("dp"), [placed("S")], src_data_rank=None)})
    first = distribute_tensor(torch.arange(4), ps.mesh_for("dp"), [placed("S")], src_data_rank=None)
    saver.save("x", {"w": first})  # the same on both
    assert load_plain_tensors(f"{root}/x")["w"].tolist() == [0, 1, 2, 3]


def test_refused(ranks, tmp_path):
    ranks(refused, str(tmp_path), world=4)


def fsdp1(seed):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(module(seed), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for _ in range(2):
        model(torch.arange(12, dtype=torch.float32).view(4, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save_and_load_fsdp1(root):
    """What torch gives of it by name, which are ShardedTensors; into another one, bit for bit."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    ps = parallel()
    model, optimizer = fsdp1(1)
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optim": states}, root, ps=ps)
    with pytest.raises(ValueError, match=r"for FSDP1, whose parameters are flat, what get_state_dict\(model"):
        save({"model": weights, "optim": optimizer}, root, ps=ps)
    other, moments = fsdp1(2)
    state = load(dict(zip(("model", "optim"), get_state_dict(other, moments), strict=True)), root, ps=ps)
    set_state_dict(other, moments, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        mine, theirs = optimizer.state.get(one, {}), moments.state.get(two, {})  # a rank may hold nothing of it
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[kind], theirs[kind]) for kind in mine)
    return {name: sum(s.tensor.sum() for s in t.local_shards()) for name, t in weights.items() if "weight" in name}


@pytest.mark.full
def test_fsdp1_by_torchs_names(ranks, tmp_path, single):
    sums = ranks(save_and_load_fsdp1, str(tmp_path / "x"), world=2)
    plain = module(3)
    load({"model": plain.state_dict()}, tmp_path / "x", ps=single)
    for name in ("0.weight", "2.weight"):
        assert torch.allclose(plain.state_dict()[name].sum(), sum(found[name] for found in sums))
