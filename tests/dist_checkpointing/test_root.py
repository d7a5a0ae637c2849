"""A directory of checkpoints: what is found, kept, pinned, swept."""

import os
import time
from itertools import count
from threading import Timer

import pytest

from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.commit import commit, planned_files
from core.dist_checkpointing.storage.fs import Fs
from core.dist_checkpointing.storage.kv_checkpoint_dir import KvCheckpointDir
from tests.dist_checkpointing.toy import (
    METADATA,
    PLACES,
    STORES,
    committed,
    files_beside_the_index,
    save,
    store,
    version_of,
    write_rank,
)

A = "a" * 32


@pytest.fixture(params=STORES)
def root(request, tmp_path):
    return CheckpointRoot(store(request.param, tmp_path))


def fill(root, *steps):
    for step in steps:
        save(root, step, step)


def damage(root, step):
    """Flips a bit of a cell's checksum: nothing but the digests can see it."""
    place = root.open(step)
    data = bytearray(place.read("model/b/c"))
    data[-1] ^= 1
    place.write("model/b/c", bytes(data))


def test_nothing_there(root):
    assert root.steps() == [] and root.latest() is None and root.tags() == {}
    assert root.sweep() == [] and root.retain(keep_last=1) == []
    with pytest.raises(ValueError, match="has no checkpoint step-00000003; steps there: none"):
        root.open(3)


def test_steps_are_sorted_as_numbers(root):
    fill(root, 100_000_000, 99_999_999)
    assert root.steps() == [99_999_999, 100_000_000] and root.latest() == 100_000_000


def test_no_negative_steps(root):
    with pytest.raises(ValueError, match="step -1: steps count from 0"):
        root.begin(-1, A)


def test_names_beside_steps(root):
    save(root, "release", 4)
    assert version_of(root.open("release")) == 4 and root.steps() == []


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".tmp-x", "tags", "a\\b", "a\n"])
def test_names_that_are_none(root, name):
    with pytest.raises(ValueError, match="is no name of a checkpoint"):
        root.begin(name, A)


def test_latest_is_the_newest_with_a_manifest(root):
    fill(root, 1, 2, 3)
    root.open(3).write("manifest.json", b"{}")
    assert root.latest() == 2


def test_retention(root):
    fill(root, 1, 2, 4, 5, 6, 7)
    root.tag("best", 1)
    assert root.retain(keep_last=2, keep_every=4) == [2, 5]
    assert root.steps() == [1, 4, 6, 7]
    root.untag("best")
    assert root.retain(keep_last=1) == [1, 4, 6]
    assert version_of(root.open(7)) == 7
    assert {name.split("/")[0] for name in files_beside_the_index(root)} == {"step-00000007"}


def test_retention_keeps_the_newest_that_verifies(root):
    fill(root, 1, 2, 3, 4)
    damage(root, 3)
    damage(root, 4)
    assert root.retain(keep_last=1) == [1]
    assert root.steps() == [2, 3, 4]
    for step in root.steps():
        damage(root, step)  # of 3 and 4 it repairs
    damage(root, 3)
    damage(root, 4)
    assert root.retain(keep_last=1) == []  # nothing verifies: nothing is removed


@pytest.mark.parametrize("arguments", [{"keep_last": 0}, {"keep_last": 1, "keep_every": 0}])
def test_retention_that_keeps_nothing(root, arguments):
    with pytest.raises(ValueError, match="must be at least 1"):
        root.retain(**arguments)


def test_tags(root):
    fill(root, 1, 2)
    root.tag("best", 1)
    root.tag("release", 1)
    root.tag("best", 2)
    assert root.tags() == {"best": 2, "release": 1}
    with pytest.raises(ValueError, match="no checkpoint step-00000009; steps there: 1, 2"):
        root.tag("best", 9)


@pytest.mark.parametrize("text", [b"", b"7", b'{"step": "7"}'])
def test_a_damaged_tag_stops_retention(root, text):
    fill(root, 1, 2)
    root.tag("best", 1)
    root.files.write("tags/best.json", text)
    with pytest.raises(ValueError, match=r"tags/best\.json"):
        root.retain(keep_last=1)
    assert root.steps() == [1, 2]


@pytest.mark.parametrize(
    "root", ["posix", *(pytest.param(kind, marks=pytest.mark.full) for kind in PLACES[1:])], indirect=True
)
def test_sweep_spares_who_is_alive(root, caplog, monkeypatch):
    monkeypatch.setattr("core.dist_checkpointing.publish.checkpoint_root.PATIENCE_S", 0.0)
    fill(root, 1)
    place = root.begin(2, A)
    write_rank(place, 0, 2)
    assert root.sweep() == []
    root.stale_s = 0.8
    with root.beating(2, A, every=0.02):
        time.sleep(1.0)
        assert root.sweep() == []
        with pytest.raises(TimeoutError, match=rf"after 0\.01 s still being written: step-00000002 \({A}\)"):
            root.wait_for_writers(0.01)
    root.wait_for_writers(5)  # stale by now, or soon
    assert "waits for a writer that a killed job left, step-00000002" in caplog.text
    assert [A in swept for swept in root.sweep()] == [True]
    assert not any(A in name for name in root.files.names())
    assert root.steps() == [1]


def test_waiting_for_a_writer_that_commits(root):
    place = root.begin(2, A)
    for rank in range(2):
        write_rank(place, rank, 2)
    arguments = (root, 2, A, planned_files(METADATA))
    late = Timer(0.1, commit, arguments, {"world_size": 2, "run": {}, "timeout_s": 5})
    late.start()
    root.wait_for_writers(30, poll_s=0.01)
    assert root.steps() == [2]
    late.join()


def test_a_rank_that_does_not_commit_waits(root):
    save(root, 2, 1)
    place = root.begin(2, A)
    for rank in range(2):
        write_rank(place, rank, 2)
    with pytest.raises(TimeoutError, match=r"step-00000002: not committed after 0\.01 s"):
        root.wait_for(2, A, timeout_s=0.01)
    late = Timer(0.1, commit, (root, 2, A, planned_files(METADATA)), {"world_size": 2, "run": {}, "timeout_s": 5})
    late.start()
    root.wait_for(2, A, timeout_s=30)
    assert version_of(root.open(2)) == 2
    late.join()


def test_an_attempt_that_is_given_up_is_not_waited_for(root):
    root.begin(2, A)
    Timer(0.1, root.abandon, (2, A)).start()
    with pytest.raises(RuntimeError, match=f"the attempt {A} was given up; rank 0 tells why"):
        root.wait_for(2, A, timeout_s=30)


def test_a_replaced_checkpoint_without_successor(tmp_path):
    root = CheckpointRoot(tmp_path, stale_s=0)
    save(root, 2, 20)
    os.rename(tmp_path / "step-00000002", tmp_path / f".replaced-step-00000002-{A}")
    assert root.steps() == [2] and version_of(root.open(2)) == 20
    os.mkdir(tmp_path / f".tmp-step-00000002-{A}")
    CheckpointRoot(tmp_path, stale_s=60).sweep()  # its successor may still be coming
    assert not (tmp_path / "step-00000002").exists() and root.steps() == [2]
    root.sweep()
    assert sorted(os.listdir(tmp_path)) == ["step-00000002"] and version_of(root.open(2)) == 20


class SeenFs(Fs):
    """Counts the listings of the root; a callback runs between two looks of a reader."""

    def __init__(self, root):
        super().__init__()
        self.root, self.listings, self.before_listing = str(root), 0, []

    def listdir(self, path):
        if os.path.normpath(path) == self.root:
            self.listings += 1
            if self.before_listing:
                self.before_listing.pop()()
        return super().listdir(path)


def test_a_step_that_is_replaced_between_two_looks_is_found(tmp_path):
    """The name is away for a moment, under which it is `.replaced-`; then its successor has it."""
    fs = SeenFs(tmp_path)
    reader, old, aside = (
        CheckpointRoot(tmp_path, fs=fs),
        tmp_path / "step-00000002",
        tmp_path / f".replaced-step-00000002-{A}",
    )
    save(CheckpointRoot(tmp_path), 2, 20)
    os.rename(old, aside)
    fs.before_listing = [lambda: os.rename(aside, old)]
    assert version_of(reader.open(2)) == 20 and not fs.before_listing


def test_a_directory_of_thousands_is_listed_a_few_times(tmp_path):
    fs = SeenFs(tmp_path)
    fill(CheckpointRoot(tmp_path), *range(4))
    root = CheckpointRoot(tmp_path, fs=fs)
    root.latest()
    assert fs.listings == 1
    fs.listings = 0
    root.sweep()
    assert fs.listings == 1
    fs.listings = 0
    save(root, 4, 4)
    assert fs.listings == 3  # the new name: before it is written, before it is published, and what it replaced
    fs.listings = 0
    root.retain(keep_last=3, keep_every=1, keep_hours=1.0)
    assert fs.listings == 1


def test_a_directory_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    with pytest.raises(ValueError, match=r"holds 1 entries \(chapter\.tex\) and is no checkpoint"):
        CheckpointRoot(tmp_path).begin("thesis", A)
    (tmp_path / "empty").mkdir()
    save(CheckpointRoot(tmp_path), "empty", 1)
    assert version_of(CheckpointRoot(tmp_path).open("empty")) == 1


def test_other_objects_are_left_alone(tmp_path):
    root = CheckpointRoot(store("memory", tmp_path), stale_s=0)
    others = {"notes.txt", "logs/today/a.txt", "step-00000009/x/y", "tags/best.txt"}
    root.files.write_all(dict.fromkeys(others, b"mine"))
    fill(root, 1, 2)
    root.tag("best", 2)
    assert root.retain(keep_last=1) == [1] and root.sweep() == []
    left = {name for name in files_beside_the_index(root) if not name.startswith("step-00000002/")}
    assert left == others | {"tags/best.json"} and root.tags() == {"best": 2}


def test_other_files_are_left_alone(tmp_path):
    root = CheckpointRoot(tmp_path, stale_s=0)
    for name in ("notes.txt", "step-7", "step-000000007", ".hidden"):
        (tmp_path / name).write_text("mine")
    fill(root, 1, 2)
    root.retain(keep_last=1)
    root.sweep()
    assert sorted(os.listdir(tmp_path)) == [".hidden", "notes.txt", "step-000000007", "step-00000002", "step-7"]


@pytest.mark.parametrize("beat", range(4))
@pytest.mark.parametrize("before", [True, False], ids=["before the put", "after it"])
def test_a_sweep_and_a_late_commit_do_not_both_succeed(tmp_path, monkeypatch, beat, before):
    """A writer that was silent for long beats again just when another job sweeps, at any of its beats."""
    place = store("memory", tmp_path)
    late, other = CheckpointRoot(place), CheckpointRoot(place, stale_s=0 if before else 60)  # it has just beaten
    save(late, 1, 1)
    place_of_attempt = late.begin(1, A)
    for rank in range(2):
        write_rank(place_of_attempt, rank, 2)
    swap, beats = KvCheckpointDir.swap, count()

    def swept_beside(files, name, old, new):
        mine = name.endswith(f"{A}.heartbeat") and new is not None and next(beats) == beat
        if mine and before:
            other.sweep()
        done = swap(files, name, old, new)
        if mine and not before:
            other.sweep()
        return done

    monkeypatch.setattr(KvCheckpointDir, "swap", swept_beside)
    try:
        committed(late, 1, A)
        outcome = 2
    except RuntimeError:
        outcome = 1
    monkeypatch.undo()
    assert version_of(late.open(1)) == outcome
    assert outcome == 1 + (not before or beat > 1)
