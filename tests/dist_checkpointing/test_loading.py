"""What does not fit or is damaged: all ranks say so, memory is untouched, every file is watched over."""

import os
import shutil
import time
from unittest import mock

import pytest
import torch
from torch import nn

from core.dist_checkpointing import (
    CheckpointManager,
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_tensors_metadata,
    save,
)
from core.dist_checkpointing.format import grid
from core.dist_checkpointing.planning.ranks import DamagedCheckpoint
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from core.dist_checkpointing.writing.saving import Saver
from tests.dist_checkpointing import small
from tests.states import state as parallel


def tiny_cells():
    return mock.patch.multiple(grid, MIN=16, MAX=64)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the checkpoint `x` of `small.state(5)`, which nobody changes; written in many small cells."""
    from core.parallel_state import ParallelState

    root = tmp_path_factory.mktemp("saved")
    with tiny_cells():
        Saver(str(root), ParallelState.single("cpu"), durable=False).save("x", small.state(5))
    return root


# what does not fit


def changed(rank=0, world=1):
    """Another model: an array more, one fewer, one of another shape, one of another dtype, a value more."""
    made = small.state(5, rank, world, empty=True)
    arrays = made["arrays"]
    del arrays["optimizer/exp_avg/table"]
    arrays["optimizer/extra"] = ShardedTensor("optimizer/extra", torch.full((3,), -1.0), (3,), (0,))
    arrays["model/count"] = ShardedTensor("model/count", torch.full((), -1.0, dtype=torch.float32), (), ())
    arrays["model/layers.w"] = ShardedTensor(
        "model/layers.w", torch.full((4, small.HIDDEN), -1.0).bfloat16(), (6, 4, small.HIDDEN), (5, 0, 0), 0, 1
    )
    made["more"] = ShardedObject("later", -3)
    return made


FIT = [
    "missing in the checkpoint: later",
    "missing in the checkpoint: optimizer/extra",
    "not asked for: optimizer/exp_avg/table",
    "model/count: it is int64 in the checkpoint and float32 here; only floating dtypes are converted",
    r"model/layers.w: its shape is (3, 4, 8) in the checkpoint and (6, 4, 8) here",
]


def load_changed(root, who, world):
    """`who`: the only rank with another model, None: all have it. Everybody is told all, nothing is written."""
    ps = parallel(tp=world)
    made = changed(ps.rank, world) if who in (None, ps.rank) else small.state(5, ps.rank, world, empty=True)
    before, begin = small.snapshot(made), time.monotonic()
    with pytest.raises(ValueError, match="does not fit this model") as told:
        load(made, f"{root}/x", ps=ps)
    assert time.monotonic() - begin < 5 and not isinstance(told.value, DamagedCheckpoint)
    small.assert_untouched(made, before)
    expected = FIT if who is None else [line for line in FIT if "not asked" not in line]
    for line in expected:
        assert line in str(told.value)
    state, report = load(made, f"{root}/x", ps=ps, strict="report")
    assert report.missing == ("later", "optimizer/extra")
    assert report.unexpected == (("optimizer/exp_avg/table",) if who is None else ())
    assert sorted(report.mismatched) == ["model/count", "model/layers.w"]
    left = {"optimizer/extra", "model/count", "model/layers.w"}
    for tensor in small.tensors(made):
        if tensor.key in left:
            assert (tensor.data == -1).all(), tensor.key
        else:
            small.assert_holds({"arrays": {tensor.key: tensor}}, 5)
    assert state["step"] == 5 and state.get("more", -3) == -3
    return str(report)


def test_another_model(ranks, saved):
    assert ranks(load_changed, str(saved), None, 1, world=1) == ["\n".join(FIT)]
    first, second = ranks(load_changed, str(saved), None, 2, world=2)
    assert first == second
    first, second = ranks(load_changed, str(saved), 1, 2, world=2)
    assert first == second


def load_impossible(root):
    """Only rank 1's template is no state at all."""
    ps = parallel(tp=2)
    wrong = {"w": torch.ones(2, dtype=torch.float8_e4m3fnuz)}, {"a": {1}}, {"..": torch.ones(1)}
    for template in wrong:
        made = template if ps.rank else small.state(5, 0, 2, empty=True)
        before = None if ps.rank else small.snapshot(made)
        with pytest.raises(
            ValueError, match="" if ps.rank else "^rank 1: .*(no stored form|set cannot be saved|no.* a path)"
        ):
            load(made, f"{root}/x", ps=ps)
        if not ps.rank:
            small.assert_untouched(made, before)
    with pytest.raises(FileNotFoundError, match="y does not exist; give a step's own"):
        load(small.state(5, ps.rank, 2), f"{root}/y", ps=ps)


def test_a_template_that_is_none(ranks, saved):
    ranks(load_impossible, str(saved), world=2)


def test_layers_that_are_not_there(tmp_path, single):
    """12 layers into 24 and back: the array is named once, not each layer."""

    def made(layers):
        return {
            f"layers.{n}.w": ShardedTensor("model/layers.w", torch.full((2,), float(n)), (layers, 2), (n, 0), 0, 1)
            for n in range(layers)
        }

    saver = Saver(str(tmp_path), single, durable=False)
    for layers in (12, 24):
        saver.save(str(layers), made(layers))
    for there, here in ((12, 24), (24, 12)):
        with pytest.raises(ValueError) as told:
            load(made(here), tmp_path / str(there), ps=single)
        line = f"model/layers.w: its shape is ({there}, 2) in the checkpoint and ({here}, 2) here"
        assert str(told.value).count("model/layers") == 1 and line in str(told.value)


def test_stages_of_ones_own_are_read_from_a_whole_model(tmp_path, single):
    """The message has the mapping's line for one of the names; a function of all keys does for the optimizer, too."""
    whole = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    state = {"model": whole.state_dict(), "optimizer": {"exp_avg": whole.state_dict()}}
    Saver(str(tmp_path), single, durable=False).save("x", state)
    stages = nn.ModuleDict({"0": nn.Sequential(nn.Linear(2, 3)), "1": nn.Sequential(nn.Linear(3, 2))})
    values = {f"stages.{key}": value for key, value in stages.state_dict().items()}
    state = {"model": values, "optimizer": {"exp_avg": {key: value.clone() for key, value in values.items()}}}
    line = (
        r"where names alone differ, give load a mapping, as mapping=\{'model/stages.0.0.bias': 'model/0.bias'\}, or"
    )
    with pytest.raises(ValueError, match=line):
        load(state, tmp_path / "x", ps=single)
    places = {"stages.0.0.": "0.", "stages.1.0.": "2."}

    def other_name(key):
        for here, there in places.items():
            if here in key:
                return key.replace(here, there)
        return key

    load(state, tmp_path / "x", ps=single, mapping=other_name)
    assert torch.equal(stages["1"][0].weight, whole[2].weight)
    assert torch.equal(state["optimizer"]["exp_avg"]["stages.0.0.bias"], whole[0].bias)


def test_a_value_is_no_array_and_an_array_no_value(tmp_path, single):
    Saver(str(tmp_path), single, durable=False).save("x", {"w": torch.ones(2), "v": 1})
    with pytest.raises(ValueError, match=r"checkpoint: v \(a value there.*\n.*checkpoint: w \(a tensor there"):
        load({"w": 3, "v": torch.ones(2)}, tmp_path / "x", ps=single)
    state, report = load({"w": 3, "v": torch.ones(2)}, tmp_path / "x", ps=single, strict="report")
    assert state["w"] == 3 and state["v"].tolist() == [1, 1] and report.missing == ("v", "w")


@pytest.mark.parametrize("into", [torch.float64, torch.float16, torch.bfloat16])
def test_cast(tmp_path, single, into):
    value = torch.randn(5, 3, dtype=torch.float32)
    Saver(str(tmp_path), single, durable=False).save("x", {"model": {"w": value, "n": torch.ones(2).int()}})
    template = {"model": {"w": torch.zeros(5, 3, dtype=into), "n": torch.zeros(2).int()}}
    with pytest.raises(ValueError, match=r"model/w: it is float32 in the checkpoint and .*float\d+ here; give cast"):
        load(template, tmp_path / "x", ps=single)
    assert not template["model"]["w"].any()
    back = load(template, tmp_path / "x", ps=single, cast=True)["model"]
    assert torch.equal(back["w"], value.to(into)) and back["n"].tolist() == [1, 1]
    template["model"]["n"] = torch.zeros(2)  # an integer is not a rounded number
    with pytest.raises(ValueError, match="model/n: it is int32 in the checkpoint and float32 here"):
        load(template, tmp_path / "x", ps=single, cast=True)


def test_only_the_model(saved, single):
    made = small.state(5, empty=True)
    rest = {key: parts for key, parts in made["arrays"].items() if not key.startswith("model/")}
    for key in rest:
        del made["arrays"][key]
    state, report = load({"arrays": made["arrays"]}, saved / "x", ps=single, strict="report")
    assert not report
    small.assert_holds(made, 5)
    assert all((part.data == -1).all() for part in small.tensors(rest))
    assert isinstance(state["arrays"]["model/layers.w"], list) and state["arrays"]["model/count"].item() == 5


def test_a_derived_array_that_nobody_asks_for_is_told(saved, single):
    """`model/table` is not stored; who loads the model without it is told all the same."""
    made = small.state(5, empty=True)["arrays"]
    template = {key: made[key] for key in ("model/layers.w", "model/layers.norm", "model/count")}
    # one name too many: a tied weight's second one, perhaps
    with pytest.raises(
        ValueError, match=r"not asked for: model/table\n(.|\n)*a tied weight has two names in state_dict"
    ):
        load(template, saved / "x", ps=single)


def test_readers_without_a_template(saved):
    assert load_common_state_dict(saved / "x") == {"order": [5, 5], "step": 5}
    found, expected = load_plain_tensors(saved / "x"), small.wholes(5)
    assert found.keys() == {key for key in expected if key == "model/count" or not key.startswith("model/")}
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert load_plain_tensors(saved / "x", keys="optimizer/exp*/t*").keys() == {"optimizer/exp_avg/table"}
    facts = load_tensors_metadata(saved / "x")
    assert facts == {key: (tuple(t.shape), t.dtype) for key, t in found.items()}
    for reader in (load_common_state_dict, load_plain_tensors, load_tensors_metadata):
        with pytest.raises(FileNotFoundError, match="is no checkpoint"):
            reader(saved)


# damage


def flip(path, others):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def truncate(path, others):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path, others):
    path.write_bytes(b"")


def delete(path, others):
    path.unlink()


def folder(path, others):
    path.unlink()
    path.mkdir()


def looped(path, others):
    path.unlink()
    path.symlink_to(path)


def piped(path, others):
    path.unlink()
    os.mkfifo(path)


def swap(path, others):
    """With a sibling of equal size and another content; False: there is none."""
    data = path.read_bytes()
    for other in others:
        if other.stat().st_size == len(data) and (old := other.read_bytes()) != data:
            path.write_bytes(old)
            other.write_bytes(data)
            return True
    return False


READ = ("manifest.json", "zarr.json")  # what `load` reads beside cells; of the rest it looks at sizes


DAMAGES = [flip, truncate, empty, delete, swap, folder]


@pytest.mark.parametrize("every", [len(DAMAGES), pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_file_is_watched_over(saved, tmp_path, single, damage, every):
    """The shorter form does each damage to a part of the files, and some damage to each file."""
    files = sorted(p.relative_to(saved / "x") for p in (saved / "x").rglob("*") if p.is_file())
    assert len(files) > 40
    files = files[DAMAGES.index(damage) % every :: every]
    done, target = 0, tmp_path / "x"
    shutil.copytree(saved / "x", target)
    for name in files:
        kept = {p: p.read_bytes() for p in [target / name, *(target / name.parent).iterdir()] if p.is_file()}
        if damage(target / name, [p for p in kept if p != target / name]) is not False:
            done += 1
            problems = check(open_checkpoint_dir(target), full=True)
            assert any(str(target / name) in line for line in problems), (name, problems)
            made = small.state(5, empty=True)
            if name.name.startswith("c") or str(name) in READ or damage not in (flip, swap):
                told = str(name.parent) if damage is swap else str(name)  # the other one is damaged too
                with pytest.raises((DamagedCheckpoint, FileNotFoundError), match=told):
                    load(made, target, ps=single)
            else:
                load(made, target, ps=single)
                small.assert_holds(made, 5)
        for path, data in kept.items():
            if path.is_dir():
                path.rmdir()
            path.write_bytes(data)
    assert check(open_checkpoint_dir(target), full=True) == []
    assert done == len(files) if damage is not swap else done > 15 / every


def test_without_verification_only_checksums_are_looked_at(saved, tmp_path, single):
    shutil.copytree(saved / "x", tmp_path / "x")
    flip(next((tmp_path / "x" / "optimizer/main/table").glob("c.*")), [])
    (tmp_path / "x" / "receipts" / "00000.json").unlink()
    with pytest.raises(DamagedCheckpoint, match="optimizer/main/table/c"):
        load(small.state(5, empty=True), tmp_path / "x", ps=single, verify=False)


def falls_back(root, name, world):
    ps, warnings = parallel(tp=world), []
    manager = CheckpointManager(root, ps=ps)
    found = small.state(0, ps.rank, world, empty=True)
    with pytest.MonkeyPatch.context() as patch:
        target = "core.dist_checkpointing.reading.newest.log.warning"
        patch.setattr(target, lambda text, *more: warnings.append(text % more))
        step, state = manager.load_latest(found)
    small.assert_holds(found, 1)
    manager.close()
    assert step == 1 and state["step"] == 1
    (warning,) = warnings
    assert "step-00000002 is damaged, falling back to the one before" in warning and name in warning, warning


@pytest.mark.parametrize("world", [1, 2])
def test_the_newest_is_damaged(ranks, saved, tmp_path, single, world):
    """By its manifest, its group, a size, a byte of a cell that only one of two ranks reads, what is no file."""
    saver = Saver(str(tmp_path), single, durable=False)
    with tiny_cells():
        for step in (1, 2):
            saver.save(f"step-0000000{step}", small.state(step))
    kept = tmp_path / "kept"
    newest = tmp_path / "step-00000002"
    newest.rename(kept)
    last = max(kept.joinpath("optimizer/exp_avg/table").glob("c.*"))
    for name, damage in (
        ("manifest.json", flip),
        ("zarr.json", flip),
        ("receipts/00000.json", truncate),
        (str(last.relative_to(kept)), flip),
        (str(last.relative_to(kept)), delete),
        ("manifest.json", looped),
        ("zarr.json", piped),
        (str(last.relative_to(kept)), looped),
    ):
        shutil.copytree(kept, newest)
        damage(newest / name, [])
        ranks(falls_back, str(tmp_path), name, world, world=world)
        shutil.rmtree(newest)


def test_none_is_whole(tmp_path, single):
    saver = Saver(str(tmp_path), single, durable=False)
    for step in (1, 2):
        saver.save(f"step-0000000{step}", small.state(step))
        flip(tmp_path / f"step-0000000{step}" / "manifest.json", [])
    manager = CheckpointManager(tmp_path, ps=single)
    with pytest.raises(DamagedCheckpoint, match=r"(?s)none of the 2 steps in .* is whole:\nstep 2: .*\nstep 1: "):
        manager.load_latest(small.state(0, empty=True))
    with pytest.raises(FileNotFoundError, match="has no checkpoint; start afresh"):
        CheckpointManager(tmp_path / "other", ps=single).load_latest(small.state(0, empty=True))


def test_another_model_is_no_damage(tmp_path, single):
    """An older step is not loaded instead: it would be as wrong, and silently older."""
    saver = Saver(str(tmp_path), single, durable=False)
    for step in (1, 2):
        saver.save(f"step-0000000{step}", small.state(step))
    with pytest.raises(ValueError, match="step-00000002/ does not fit this model"):
        CheckpointManager(tmp_path, ps=single).load_latest(changed())


def test_what_lies_there_as_another_kind_is_told(tmp_path):
    """torchtitan's counters are tensors without a dim; a scheduler's state is a dict."""
    path = tmp_path / "step"
    save({"train": {"step": torch.tensor(3)}, "sched": {"rate": 1.0, "last": 2}}, path)
    with pytest.raises(ValueError, match=r"train/step \(a tensor there: ask with one"):
        load({"train": {"step": 0}}, path)
    with pytest.raises(ValueError, match=r"sched \(a dict there, with sched/last, sched/rate: ask with a dict"):
        load({"sched": None}, path)


def test_a_mapping_is_offered_although_the_first_name_is_new(tmp_path):
    save({"model": {"stages.0.w.weight": torch.ones(2)}}, tmp_path / "step")
    asked = {"model": {"cos": torch.ones(3), "w.weight": torch.zeros(2)}}
    with pytest.raises(ValueError, match=r"mapping=\{'model/w.weight': 'model/stages.0.w.weight'\}"):
        load(asked, tmp_path / "step")
