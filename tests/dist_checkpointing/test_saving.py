"""Saves that go wrong: all ranks hear it within seconds, by whose fault, and the old checkpoint is intact."""

import ast
import pickle
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from torch import nn

from core.dist_checkpointing import ShardedObject, ShardedTensor, load, load_common_state_dict, save
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.state.mapping import sharded_state_dict
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from core.dist_checkpointing.storage.fs import Fs
from core.dist_checkpointing.writing.job import Job
from core.dist_checkpointing.writing.saving import Saver
from tests.dist_checkpointing import small
from tests.dist_checkpointing.test_async_save import leftovers
from tests.states import state as parallel

ROOMS = Path(__file__).parents[2] / "core" / "dist_checkpointing"


def quick(root, ps):
    """A saver that waits for no disk."""
    return Saver(str(root), ps, durable=False)


def test_into_directories_that_are_made(tmp_path, single):
    for name in ("a/b/c", "a/b/c", "a/b/d/"):
        save(small.state(1), tmp_path / name, ps=single)
        found = small.state(1, empty=True)
        state = load(found, tmp_path / name, ps=single)
        small.assert_holds(found, 1)
        assert state["step"] == 1 and state["named"] == [1, 1]
    assert not leftovers(tmp_path / "a/b")


@pytest.mark.parametrize("url", [".", "a/..", "/", "gs://bucket", "memory://x", "s3://bucket/"])
def test_what_names_no_checkpoint(url, single, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="names no checkpoint; give a directory"):
        save(small.state(1), url, ps=single)
    assert not list(tmp_path.iterdir())


def test_a_directory_of_something_else_is_not_replaced(tmp_path, single):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"home holds 1 entries \(thesis.tex\) and is no checkpoint"):
        save(small.state(1), tmp_path / "home", ps=single)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "x"


def test_a_relative_path(tmp_path, single, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save({"w": torch.ones(2)}, "here", ps=single)
    assert (tmp_path / "here" / "manifest.json").exists()


# one rank of two is wrong


def rows(key, value, *boxes, shape=None):
    return [ShardedTensor(key, value[a:b], tuple(shape or value.shape), (a,)) for a, b in boxes]


W = torch.arange(6.0, dtype=torch.float32)
WRONG = {  # what rank 0 and rank 1 save -> what both are told
    "another shape": (
        {"w": rows("w", W, (0, 3))},
        {"w": rows("w", torch.arange(7.0, dtype=torch.float32), (3, 7))},
        r"w is ArrayInfo\(shape=\(6,\).* on rank 0 and .*\(7,\).* on rank 1; build the same model",
    ),
    "another dtype": ({"w": W}, {"w": W.half()}, r"w is .*float32.* on rank 0 and .*float16.* on rank 1"),
    "overlap": (
        {"w": W},
        {"w": rows("w", W, (0, 4), (3, 6))},
        r"rank 1 holds \(\(0, 4\),\) and \(\(3, 6\),\) of w, which overlap",
    ),
    "hole": (
        {"w": rows("w", W, (0, 2))},
        {"w": rows("w", W, (3, 6))},
        r"no rank holds \(\(2, 3\)",
    ),
    "a set": ({"w": W}, {"w": W, "args": {"x": {1}}}, "args/x: set cannot be saved; give"),
    "not a number": (
        {"w": W, "loss": 1.0},
        {"w": W, "loss": float("nan")},
        "rank 1 has loss=.*nan.*, another one 1.0",
    ),
    "objects that differ": ({"w": W, "step": 1}, {"w": W, "step": 2}, "rank 1 has step=2, another one 1"),
    "two values of one key": (
        {"w": W},
        {"w": W, "a": ShardedObject("k", 1), "b": ShardedObject("k", 2)},
        "k is both 1 and 2; give them one key each",
    ),
    "a key that is no path": ({"w": W}, {"..": W}, "the key '..' cannot be a path"),
    "an array in an array": ({"w": W}, {"w/x": W}, "w/x would lie inside the array w"),
    "no stored form": (
        {"w": W},
        {"w": W.to(torch.float8_e4m3fnuz)},
        "w is of torch.float8_e4m3fnuz, which has no stored form",
    ),
    "not dense": (
        {"w": torch.eye(2)},
        {"w": torch.eye(2).to_sparse()},
        "w is of torch.sparse_coo, which",
    ),
    "parts that disagree": (
        {"w": W},
        {"w": rows("w", W, (0, 3)) + rows("w", W, (0, 3), shape=(9,))},
        "w: its parts on one rank disagree",
    ),
}


def save_wrong(root):
    ps = parallel(tp=2)
    saver = quick(root, ps)
    saver.save("old", small.state(1, ps.rank, 2))
    begin = time.monotonic()
    for name, (first, second, told) in WRONG.items():
        with pytest.raises(ValueError, match=told):
            saver.save("old", second if ps.rank else first)
            pytest.fail(name)
    assert time.monotonic() - begin < 10
    found = small.state(1, ps.rank, 2, empty=True)
    load(found, f"{root}/old", ps=ps)
    small.assert_holds(found, 1)
    saver.save("new", {"w": rows("w", W, *([(3, 6)] if ps.rank else [(0, 3)]))})


def test_states_that_cannot_be_saved(ranks, tmp_path):
    ranks(save_wrong, str(tmp_path), world=2)
    assert not leftovers(tmp_path)
    assert (zarr.open_group(tmp_path / "new", mode="r")["w"][:] == W.numpy()).all()


def fails_inside(root, who, where):
    """Rank `who` raises while it writes: at once, after half, at its receipt."""
    ps = parallel(tp=2)
    saver, real = quick(root, ps), Job.write
    saver.save("old", small.state(1, ps.rank, 2))

    def write(self, cells):
        if where == "begin":
            raise OSError(5, "the cable is out")

        def some():
            for number, cell in enumerate(cells):
                if number == 1:
                    raise OSError(5, "the cable is out")
                yield cell

        return real(self, some())

    with pytest.MonkeyPatch.context() as patch:
        if ps.rank == who:
            patch.setattr(Job, "write", write)
        begin = time.monotonic()
        with pytest.raises(OSError, match=r"the cable is out" if ps.rank == who else rf"rank {who}: .*the cable"):
            saver.save("old", small.state(2, ps.rank, 2))
        assert time.monotonic() - begin < 5
    found = small.state(1, ps.rank, 2, empty=True)
    load(found, f"{root}/old", ps=ps)
    small.assert_holds(found, 1)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("where", ["begin", "middle"])
def test_a_rank_that_fails_inside(ranks, tmp_path, who, where):
    ranks(fails_inside, str(tmp_path), who, where, world=2)
    assert not leftovers(tmp_path)


def slow_start(root):
    """Rank 0 takes its time to make the directory: rank 1 has nothing to write but its receipt."""
    ps, real = parallel(tp=2), Job.begin

    def begin(self):
        time.sleep(0.3)
        real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "begin", begin)
        quick(root, ps).save("x", {"w": W} if ps.rank == 0 else {})


def test_nobody_writes_before_there_is_a_place(ranks, tmp_path):
    ranks(slow_start, str(tmp_path), world=2)
    assert check(open_checkpoint_dir(tmp_path / "x"), full=True) == []


# disk full


def too_little(root):
    ps = parallel(tp=2)
    saver = quick(root, ps)
    saver.save("old", small.state(1, ps.rank, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fs, "free_bytes", lambda self, path: 1000)
        with pytest.raises(OSError, match=r"no space .* \d{7} bytes needed, 1000 free; the older checkpoints are"):
            saver.save("old", small.state(2, ps.rank, 2))


def test_too_little_space_is_told_before_anything_is_written(ranks, tmp_path):
    ranks(too_little, str(tmp_path), world=2)
    assert [p.name for p in tmp_path.iterdir()] == ["old"] and check(
        open_checkpoint_dir(tmp_path / "old"), full=True
    ) == []


def fills_up(root):
    """No file of rank 1 may have more than some bytes."""
    ps = parallel(tp=2)
    saver = quick(root, ps)
    saver.save("old", small.state(1, ps.rank, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {str(n): torch.ones(100_000 + n, dtype=torch.float32) for n in range(6)}
    if ps.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"no space for .*: \d{7} bytes needed, \d+ free; the older .* are intact"):
            saver.save("old", state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_fills_up(ranks, tmp_path):
    ranks(fills_up, str(tmp_path), world=2)
    assert [p.name for p in tmp_path.iterdir()] == ["old"] and check(
        open_checkpoint_dir(tmp_path / "old"), full=True
    ) == []


# strange tensors and modules


def strange():
    base = torch.arange(24.0, dtype=torch.float32)
    return {
        "transposed": base.view(4, 6).T,
        "every other": base[::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "learned": nn.Parameter(base.view(2, 12)),
        "of the same storage": base[5:9],
        "zero dims": torch.tensor(7),
        "true": torch.tensor([True, False]),
        "nans": torch.tensor([0x7FC01234, 0x7F800001, -(2**31)], dtype=torch.int32).view(torch.float32),
        "brain": torch.randn(3, 5).bfloat16().T,
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "empty": torch.ones(0, 3),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "ints": torch.tensor([-(2**63), 2**63 - 1]),
    }


def bits(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()


def test_strange_tensors(tmp_path, single):
    given = {name.replace(" ", "_"): tensor for name, tensor in strange().items()}
    quick(tmp_path, single).save("x", given)
    into = {
        name: torch.empty_strided(t.shape, t.stride() if t.numel() and name != "expanded" else (3, 1)[: t.dim()]).to(
            t.dtype
        )
        for name, t in given.items()
    }
    for tensor in into.values():
        tensor.fill_(1)
    back = load(into, tmp_path / "x", ps=single)
    for name, tensor in given.items():
        assert back[name] is into[name] and bits(back[name]) == bits(tensor), name
    assert "empty" not in zarr.open_group(tmp_path / "x", mode="r")


def test_into_a_parameter_that_learns(tmp_path, single):
    """Straight and staged (converted, shared cells): no gradient stands in the way, and none is recorded."""
    value = torch.arange(12.0).view(3, 4)
    quick(tmp_path, single).save("x", {"a": value, "b": value})
    whole = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    parts = [nn.Parameter(torch.zeros(1, 4)) for _ in range(3)]
    state = {"a": ShardedTensor("a", whole, (3, 4), (0, 0))}
    state["b"] = [ShardedTensor("b", p, (3, 4), (row, 0)) for row, p in enumerate(parts)]
    back = load(state, tmp_path / "x", ps=single, cast=True)
    assert back["a"] is whole and whole.grad_fn is None and torch.equal(whole.detach(), value.double())
    assert torch.equal(torch.cat(parts).detach(), value) and back["b"][1] is parts[1]


def test_a_foreign_module(tmp_path, single):
    def made(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Conv1d(2, 2, 1), nn.Embedding(3, 4))
        model[1](torch.randn(5, 6))
        return model

    old, new = made(1), made(2)
    quick(tmp_path, single).save("x", {"model": sharded_state_dict(old, single)})
    back = load({"model": sharded_state_dict(new, single)}, tmp_path / "x", ps=single)
    new.load_state_dict(back["model"])
    for name, tensor in old.state_dict().items():
        assert torch.equal(new.state_dict()[name], tensor), name
    assert new[1].num_batches_tracked == 1


def test_nothing_at_all(tmp_path, single):
    for name, state in (("nothing", {}), ("values", {"a": {}, "b": [], "c": None, "d": {"e": "ü"}})):
        quick(tmp_path, single).save(name, state)
        assert check(open_checkpoint_dir(tmp_path / name), full=True) == []
        assert load(state, tmp_path / name, ps=single) == state
    assert load_common_state_dict(tmp_path / "values") == {"b": [], "c": None, "d/e": "ü"}


# no pickle


def test_no_file_imports_pickle():
    """But those that read other programs' files: `test_import_hostile`."""
    paths = {*ROOMS.rglob("*.py")} - {*(ROOMS / "tools" / "foreign").glob("*.py")}
    assert len(paths) > 60
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "dill", "marshal", "shelve", "cPickle", "cloudpickle"} & set(names), path
        assert "torch.load" not in path.read_text() and "torch.save" not in path.read_text(), path
        assert "allow_pickle" not in path.read_text() and "gather_object" not in path.read_text(), path


def test_saves_and_loads_without_pickle(tmp_path, single, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle")

    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(np, "load", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    quick(tmp_path, single).save("x", small.state(3))
    found = small.state(3, empty=True)
    load(found, tmp_path / "x", ps=single)
    small.assert_holds(found, 3)


def save_plain(root):
    ps = parallel(tp=2)
    save({"same": torch.ones(2)}, f"{root}/fine", ps=ps)
    with pytest.raises(ValueError, match=r"w at \[\(0, 3\)\] differs between rank 0 and rank 1, which both hold it"):
        save({"w": torch.full((3,), float(ps.rank))}, f"{root}/x", ps=ps)


def test_plain_tensors_are_the_same_on_all_ranks(ranks, tmp_path):
    ranks(save_plain, str(tmp_path), world=2)


def test_nothing_is_saved_into_or_over_other_checkpoints(tmp_path, single):
    save({"a": 1}, tmp_path / "x", ps=single)
    with pytest.raises(ValueError, match="is a checkpoint itself; save beside it, not inside"):
        save({"a": 1}, tmp_path / "x" / "inner", ps=single)
    save({"a": 1}, tmp_path / "steps" / "step-00000001", ps=single)
    (tmp_path / "steps" / "zarr.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds other checkpoints \(step-00000001"):
        save({"a": 1}, tmp_path / "steps", ps=single)


def test_a_link_stays_a_link(tmp_path, single):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "x")
    for value in (1, 2):
        save({"a": value}, tmp_path / "link", ps=single)
        assert (tmp_path / "link").is_symlink() and load({"a": 0}, tmp_path / "link", ps=single) == {"a": value}


@pytest.mark.parametrize("state", [None, [1], "x"])
def test_a_state_is_a_dict(tmp_path, single, state):
    with pytest.raises(ValueError, match=r"a state is a dict of tensors and values, not a \w+"):
        save(state, tmp_path / "x", ps=single)


def test_one_key_is_a_tensor_or_a_value(tmp_path, single):
    with pytest.raises(ValueError, match="a/b is both a tensor and a value"):
        save({"a": {"b": 1}, "a/b": torch.ones(2)}, tmp_path / "x", ps=single)


def test_unknown_choices(tmp_path, single):
    with pytest.raises(ValueError, match="weights='BF16' is unknown"):
        save({"a": 1}, tmp_path / "x", ps=single, weights="BF16")
    save({"a": 1}, tmp_path / "x", ps=single)
    with pytest.raises(ValueError, match="strict='raise_all' is unknown"):
        load({"a": 1}, tmp_path / "x", ps=single, strict="raise_all")
