"""What killed, interrupted, outrun and busy jobs leave goes, at once or with the next save; what follows a commit
never fails it."""

import errno
import gc
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from core.dist_checkpointing import CheckpointManager, load, save
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir, open_dir
from core.dist_checkpointing.storage.fs import Fs
from core.dist_checkpointing.storage.kv_checkpoint_dir import KvCheckpointDir
from core.dist_checkpointing.tools.safetensors_files import new_folder
from core.dist_checkpointing.writing.job import Job
from tests.dist_checkpointing import small, toy
from tests.dist_checkpointing.users import files_below, made
from tests.states import state as parallel

A, B = "a" * 32, "b" * 32


def aged(top):
    """All that was left is older than any writer is silent."""
    for path in (top, *top.rglob("*")):
        os.utime(path, (1, 1))


def killed(top, single):
    """A plain save that was killed before its commit: nothing is tidied up."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Job, "conclude", interrupt)
        patch.setattr(Job, "abandon", lambda job: None)
        save({"a": 1}, top / "a", ps=single)
    assert [name[:7] for name in os.listdir(top)] == [".tmp-a-"]


@pytest.mark.parametrize("again", ["the same", "another", "prune", "export"])
def test_a_killed_plain_save_is_removed_by_what_comes_next(again, tmp_path, single, capsys):
    top = tmp_path / "top"
    killed(top, single)
    made(top, ".tmp-mine-1/file")
    left = set(os.listdir(top))
    save({"a": 1}, top / "c", ps=single)
    assert left <= set(os.listdir(top))  # it may still be alive
    aged(top)
    if again == "prune":
        assert main(["prune", str(top), "--keep-last", "1", "--dry-run"]) == 0
        assert "would remove .tmp-a-" in capsys.readouterr().out and left <= set(os.listdir(top))
        assert main(["prune", str(top), "--keep-last", "1"]) == 0
    elif again == "export":
        with new_folder(top / "b"):
            pass
    else:
        save({"a": 2}, top / ("a" if again == "the same" else "b"), ps=single)
    assert set(os.listdir(top)) - {"a", "b"} == {"c", ".tmp-mine-1"}


@pytest.mark.parametrize("where", ["begin", "write", "conclude"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupt_leaves_nothing(where, error, tmp_path, single, monkeypatch):
    save(small.state(1), tmp_path / "x", ps=single)
    real = getattr(Job, where)

    def interrupted(job, *arguments):
        real(job, *arguments) if where != "conclude" else None
        raise error

    monkeypatch.setattr(Job, where, interrupted)
    with pytest.raises(error):
        save(small.state(2), tmp_path / "x", ps=single)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["x"]
    found = small.state(1, empty=True)
    load(found, tmp_path / "x", ps=single)
    small.assert_holds(found, 1)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_at_any_moment(tmp_path, single):
    """By a signal, while threads write: none of them brings back what was removed."""
    state, dice, interrupted = small.state(1) | {str(n): torch.ones(300, 300) for n in range(12)}, random.Random(1), 0
    save(state, tmp_path / "x", ps=single)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.001, 0.06))
                save(state, tmp_path / "x", ps=single)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except (KeyboardInterrupt, RuntimeError) as error:
                # between a Condition's acquire and its release Python's own threading makes another error of it
                assert isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt)
                interrupted += 1
            time.sleep(0.01)
            assert os.listdir(tmp_path) == ["x"] and check(open_checkpoint_dir(tmp_path / "x"), full=True) == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.collect()
    assert interrupted > 10


def test_what_is_removed_does_not_come_back(tmp_path):
    place = CheckpointRoot(tmp_path).begin(1, A)
    place.write_all({"a/b/c": b"x"})
    CheckpointRoot(tmp_path).abandon(1, A)
    with pytest.raises(FileNotFoundError, match="removed meanwhile, or not shared by all hosts"):
        place.write_all({"a/d": b"x"})
    assert os.listdir(tmp_path) == []


def test_an_interrupted_asynchronous_save_leaves_nothing(tmp_path, single, monkeypatch):
    manager = CheckpointManager(tmp_path, ps=single)
    manager.save_async(1, small.state(1)).wait()
    with monkeypatch.context() as patch:
        patch.setattr("core.dist_checkpointing.manager.exchanged_cells", interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.save_async(2, small.state(2))
    assert {name for name in os.listdir(tmp_path) if name[0] != "."} == {"step-00000001"}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]
    manager.save_async(2, small.state(2)).wait()
    manager.close()
    assert manager.steps() == [1, 2]


def interrupt(*arguments):
    raise KeyboardInterrupt


def test_who_loses_a_race_leaves_nothing(tmp_path, single, monkeypatch):
    """Another job commits the name while this one writes."""
    real = Job.write

    def write(job, cells):
        with monkeypatch.context() as patch:
            patch.setattr(Job, "write", real)
            save({"a": 1}, tmp_path / "x", ps=single)
        return real(job, cells)

    monkeypatch.setattr(Job, "write", write)
    with pytest.raises(RuntimeError, match="was committed by another attempt"):
        save({"a": 2}, tmp_path / "x", ps=single)
    assert os.listdir(tmp_path) == ["x"] and load({"a": 0}, tmp_path / "x", ps=single) == {"a": 1}


def save_apart(top):
    """Two nodes that do not share the directory."""
    ps = parallel(tp=2)
    with pytest.raises((OSError, RuntimeError, ValueError)):
        save(small.state(1, ps.rank, 2), f"{top}/{ps.rank}/x", ps=ps)


def test_a_directory_that_is_not_shared(ranks, tmp_path):
    ranks(save_apart, str(tmp_path), world=2)
    assert [name for rank in "01" if (tmp_path / rank).exists() for name in os.listdir(tmp_path / rank)] == []


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
def test_a_clock_that_is_hours_off(ahead, tmp_path, monkeypatch):
    """That of a host; the file server, which stamps what it keeps, has its own."""
    root, real = CheckpointRoot(tmp_path, stale_s=60), time.time
    root.begin(1, A)
    root.begin(2, B)
    for path in (tmp_path / f".tmp-step-00000002-{B}", tmp_path / f".tmp-step-00000002-{B}" / f"{B}.heartbeat"):
        os.utime(path, (real() - 100, real() - 100))
    monkeypatch.setattr(time, "time", lambda: real() + ahead)
    assert root.sweep() == [f".tmp-step-00000002-{B}"]


class Full(Fs):
    """No space for what is written as `exclusive`: the first file of a temporary."""

    def write(self, path, data, *, exclusive=False):
        if exclusive:
            Path(path).write_bytes(b"")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        super().write(path, data)


def test_a_disk_that_is_full_from_the_start(tmp_path):
    with pytest.raises(OSError, match="No space left"):
        CheckpointRoot(tmp_path, fs=Full()).begin(1, A)
    assert os.listdir(tmp_path) == []


# exports


def test_a_long_export_is_not_swept(tmp_path, monkeypatch):
    """It beats; killed, it is swept."""
    root, real = CheckpointRoot(tmp_path, stale_s=0.5), CheckpointRoot.beating
    monkeypatch.setattr(CheckpointRoot, "beating", lambda root, name, uuid: real(root, name, uuid, every=0.02))
    with new_folder(tmp_path / "out") as folder:
        (folder / "model.safetensors").write_text("x")
        aged(tmp_path)
        time.sleep(0.2)  # a beat
        assert root.sweep() == [] and not (tmp_path / "out").exists()
    assert files_below(tmp_path) == {"out/model.safetensors": b"x"}
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "other") as folder:
        (folder / "model.safetensors").write_text("x")
        shutil.copytree(folder, tmp_path / "copy")
        raise KeyboardInterrupt
    assert sorted(os.listdir(tmp_path)) == ["copy", "out"]
    (uuid,) = [name.split(".")[0] for name in os.listdir(tmp_path / "copy") if name.endswith("heartbeat")]
    os.rename(tmp_path / "copy", tmp_path / f".tmp-other-{uuid}")
    aged(tmp_path)
    assert root.sweep() == [f".tmp-other-{uuid}"] and os.listdir(tmp_path) == ["out"]


# what follows a commit


class Nfs(Fs):
    """A file that is read by another host: removed, it has another name, and its directory cannot go."""

    busy = True

    def unlink(self, path):
        if self.busy and os.path.basename(path) == "c" and ".nfs" not in path:
            os.rename(path, os.path.dirname(path) + "/.nfs00000001")
        elif self.busy and ".nfs" in path:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        else:
            super().unlink(path)


@pytest.mark.parametrize("how", ["replaced", "retained"])
def test_what_is_busy_is_left_to_the_next_sweep(how, tmp_path, caplog):
    fs = Nfs()
    root = CheckpointRoot(tmp_path, fs=fs)
    toy.save(root, 1, 1)
    toy.save(root, 1 if how == "replaced" else 2, 2)
    if how == "retained":
        assert root.retain(keep_last=1) == [1]
    assert "is left to be removed later: [Errno 39] Directory not empty" in caplog.text
    (step,) = root.steps()
    assert toy.version_of(root.open(step)) == 2
    (trash,) = [name for name in os.listdir(tmp_path) if name.startswith(".trash-")]
    uuid = trash.removeprefix(".trash-")
    assert set(files_below(tmp_path / trash)) == {"model/b/.nfs00000001", f"{uuid}.trash"}
    assert root.sweep() == [trash] and trash in os.listdir(tmp_path)  # still read
    fs.busy = False
    assert root.sweep() == [trash] and os.listdir(tmp_path) == [f"step-{step:08d}"]


@pytest.mark.parametrize("beside", [False, True])
def test_retention_that_fails_does_not_fail_the_save(beside, tmp_path, single, caplog):
    manager = CheckpointManager(tmp_path, ps=single, keep_last=1)
    manager.save(1, {"a": torch.ones(2)})
    CheckpointRoot(tmp_path).tag("best", 1)
    (tmp_path / "tags" / "best.json").write_text("{")
    for step in (2, 3):
        manager.save_async(step, {"a": torch.ones(2)}).wait() if beside else manager.save(step, {"a": torch.ones(2)})
    assert manager.steps() == [1, 2, 3]
    manager.close()
    assert (
        "step-00000003 is saved, old checkpoints are not removed: " in caplog.text and "tags/best.json" in caplog.text
    )


def test_what_cannot_be_removed_from_an_object_store_is_left_to_the_next_save(single, monkeypatch, caplog):
    url = "memory://leftovers"
    save({"a": 1}, f"{url}/x", ps=single)
    with monkeypatch.context() as patch:
        patch.setattr(KvCheckpointDir, "remove_all", unreachable)
        save({"a": 2}, f"{url}/x", ps=single)
    assert load({"a": 0}, f"{url}/x", ps=single) == {"a": 2}
    assert "x: what it replaced is left to be removed later: the network is down" in caplog.text
    assert CheckpointRoot(url).leftovers() != []
    save({"a": 3}, f"{url}/x", ps=single)
    assert CheckpointRoot(url).leftovers() == [] and len(open_dir(url).names()) == 5


def unreachable(*arguments):
    raise ValueError("the network is down")
