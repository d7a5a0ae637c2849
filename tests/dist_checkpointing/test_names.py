"""Loading under other names and types, and reading a part of one tensor."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from core.dist_checkpointing import Source, lazy_tensors, load
from core.dist_checkpointing.state.nested import map_leaves
from core.dist_checkpointing.writing.saving import Saver
from tests.dist_checkpointing import small
from tests.dist_checkpointing.meshes import small_cells
from tests.dist_checkpointing.test_loading import flip
from tests.states import state as parallel


@pytest.fixture
def saved(tmp_path, single):
    """4 layers of one stack, a table, and values."""
    state = {
        "model": {"old.w": torch.arange(6.0).view(2, 3), "h": torch.ones(2).half(), "étape w": torch.ones(3)},
        "other": {"x": torch.ones(1)},
        "epoch": 3,
    }
    Saver(str(tmp_path), single, durable=False).save("x", state)
    return tmp_path / "x"


def test_renames_and_casts(saved, single):
    """By a dict of those that differ, or by a function; each key has a cast of its own."""
    target = {"net": {"new.w": torch.zeros(2, 3), "h": torch.zeros(2), "é": torch.zeros(3)}, "when": None}
    names = {"net/new.w": "model/old.w", "net/h": Source("model/h", cast=True), "net/é": "model/étape w"}
    back = load(target, saved, ps=single, mapping=names | {"when": "epoch"})
    assert back["net"]["new.w"].tolist() == [[0, 1, 2], [3, 4, 5]] and back["net"]["h"].tolist() == [1, 1]
    assert back["when"] == 3 and back["net"]["é"].tolist() == [1, 1, 1]
    again = map_leaves(target, lambda path, leaf: torch.zeros_like(leaf) if path[-1] != "when" else None)
    assert load(again, saved, ps=single, mapping=(names | {"when": "epoch"}).get)["net"]["new.w"][1, 2] == 5
    with pytest.raises(ValueError, match=r"net/h: it is float16 in the checkpoint and float32 here; give cast=True"):
        load(target, saved, ps=single, mapping=names | {"when": "epoch", "net/h": "model/h"})


def test_what_a_mapping_cannot_say(saved, single):
    target = {"model": {"w": torch.zeros(2, 3)}}
    for mapping, told in (
        ({"model/v": "model/old.w"}, r"the mapping names model/v, which no state has; .*and here are model/w"),
        ({"model/w": "model/none"}, r"missing in the checkpoint: model/w\n"),
        ({"model/w": 3}, r"the mapping gives 3 for model/w; give a key"),
        (lambda key: None, r"the mapping gives None for model/w"),
        ({"model/w": "model/h"}, r"model/w: its shape is \(2,\) in the checkpoint and \(2, 3\) here"),
        ({"model/w": "model/old.w"}, r"not asked for: model/h"),
    ):
        with pytest.raises(ValueError, match=told):
            load(target, saved, ps=single, mapping=mapping)
    with pytest.raises(ValueError, match=r"Source of 'model/h' with shape=2: give a tuple of its dims"):
        Source("model/h", shape=2)
    assert not target["model"]["w"].any()
    _, report = load(target, saved, ps=single, strict="report", mapping={"model/w": "model/old.w"})
    assert report.unexpected == ("model/%C3%A9tape%20w", "model/h") and target["model"]["w"][1, 2] == 5


def test_an_optimizer_under_other_names(tmp_path, single):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": {f"old.{name}": p for name, p in model.state_dict().items()}, "optimizer": optimizer}
    Saver(str(tmp_path), single, durable=False).save("x", state)
    again = nn.Linear(3, 2)
    resumed = torch.optim.AdamW(again.parameters())

    def names(key):
        group, _, name = key.rpartition("/")
        return f"{group}/old.{name}"

    load(
        {"model": again.state_dict(), "adam": resumed},
        tmp_path / "x",
        ps=single,
        mapping=lambda key: names(key.replace("adam/", "optimizer/")),
    )
    assert torch.equal(resumed.state[again.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert resumed.param_groups[0]["lr"] == 0.3 and torch.equal(again.weight, model.weight)


def load_on_two(root):
    """A name that only one rank's state has is no mistake."""
    ps = parallel(pp=2)
    key, shape = ("a", (2, 3)) if ps.rank else ("b", (3,))
    state = {key: torch.zeros(shape, dtype=torch.float32)}
    names = {"model/a": "model/old.w", "model/b": "model/étape w"}
    load({"model": state}, root, ps=ps, mapping=names | {"model/a": Source("model/old.w")}, strict=False)
    assert next(iter(state.values())).any()
    with pytest.raises(ValueError, match="the mapping names model/c"):
        load({"model": state}, root, ps=ps, mapping={"model/c": "model/h"}, strict=False)
    with pytest.raises(ValueError, match="the mapping gives 3 for model/a"):  # which one of them has
        load({"model": state}, root, ps=ps, mapping={"model/a": 3})


def test_all_ranks_names(ranks, saved):
    ranks(load_on_two, str(saved), world=2)


INDICES = np.s_[..., 1, -1, 2:5, 20:, 3:1, (1, 2), (slice(1, 3), 2), (..., 5), (0, ...), (-2, slice(-3, None))]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_parts_of_one_tensor(index, tmp_path, single):
    value = torch.arange(24 * 8).view(24, 8)
    with small_cells():
        Saver(str(tmp_path), single, durable=False).save("x", {"model": {"é": value}})
    found = lazy_tensors(tmp_path / "x")["model/é"]
    assert found.shape == (24, 8) and found.dtype == torch.int64
    assert torch.equal(found[index], value[index])


def test_indices_that_are_none(saved):
    found = lazy_tensors(saved)["model/old.w"]
    for index, kind in ((5, IndexError), ((0, 0, 0), IndexError), (np.s_[::2], IndexError), ("a", TypeError)):
        with pytest.raises(kind):
            found[index]
    with pytest.raises(IndexError, match="too many"):
        found[..., ...]


def test_derived_ones_and_scalars(tmp_path, single):
    with small_cells():
        Saver(str(tmp_path), single, durable=False).save("x", small.state(5))
    found, expected = lazy_tensors(tmp_path / "x"), small.wholes(5)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key][...], tensor), key
    assert torch.equal(found["model/layers.w"][1, 2:], expected["model/layers.w"][1, 2:])


def bytes_read():
    """By this process, from files."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts what a process reads")
def test_nothing_else_is_read(tmp_path, single):
    """Damage elsewhere is not met, and one row of 32 MiB costs a piece."""
    big = torch.arange(2**22, dtype=torch.float64).view(2**10, 2**12)
    Saver(str(tmp_path), single, durable=False).save("x", {"big": big, "bad": torch.ones(5)})
    flip(tmp_path / "x" / "bad" / "c.0", [])
    found = lazy_tensors(tmp_path / "x")
    before = bytes_read()
    row = found["big"][700]
    assert 0 < bytes_read() - before < 4 << 20
    assert torch.equal(row, big[700])
    before = bytes_read()
    assert torch.equal(found["big"][...], big) and bytes_read() - before > 16 << 20
    with pytest.raises(ValueError, match=r"bad/c\.0"):
        found["bad"][...]
