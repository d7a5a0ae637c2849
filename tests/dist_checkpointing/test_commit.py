"""Receipts to a committed checkpoint: nothing less than the plan, nothing of another attempt."""

import contextlib
import json
import threading
import time
import zlib

import numpy as np
import pytest
import zarr

from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.commit import commit, planned_files, write_failure, write_receipt
from core.dist_checkpointing.storage.kv_checkpoint_dir import KvCheckpointDir
from tests.dist_checkpointing.crash import CrashFs, CrashStore
from tests.dist_checkpointing.toy import (
    METADATA,
    STORES,
    array,
    entry,
    files_of,
    save,
    store,
    version_of,
    write_rank,
)

A, B = "a" * 32, "b" * 32


@pytest.fixture(params=STORES)
def root(request, tmp_path):
    return CheckpointRoot(store(request.param, tmp_path))


def finish(root, uuid, timeout_s=0.02):
    return commit(root, 7, uuid, planned_files(METADATA), world_size=2, run={}, timeout_s=timeout_s)


def test_a_save_of_two_ranks(root):
    save(root, 7, 3, uuid=A)
    assert root.steps() == [7] and root.latest() == 7
    place = root.open(7)
    assert version_of(place) == 3
    manifest = json.loads(place.read("manifest.json"))
    crc = manifest.pop("crc")
    assert crc == zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())
    assert manifest["format"] == 1 and manifest["uuid"] == A and manifest["run"] == {"version": 3}
    assert set(place.names()) == {*manifest["files"], "manifest.json"}  # no heartbeat, no part


def test_zarr_reads_it(tmp_path):
    save(CheckpointRoot(tmp_path), 7, 3)
    group = zarr.open_group(tmp_path / "step-00000007", mode="r")
    assert np.array_equal(group["model/a"][:], np.full((3, 2), 3, "f4"))
    assert group["model/b"][()] == 3


def test_planned_files():
    metadata = {"": METADATA[""], "x": array([5, 4], [2, 4]), "y": array([], []), "z": array([0], [3])}
    cells = {"x/c.0.0", "x/c.1.0", "x/c.2.0", "y/c"}
    assert planned_files(metadata) == cells | {"zarr.json", "x/zarr.json", "y/zarr.json", "z/zarr.json"}


def test_the_committer_waits_for_the_last_rank(root):
    place = root.begin(7, A)
    write_rank(place, 0, 1)
    late = threading.Timer(0.1, write_rank, (place, 1, 1))
    late.start()
    finish(root, A, timeout_s=10)
    late.join()
    assert version_of(root.open(7)) == 1


def test_silent_ranks_are_named(root):
    write_rank(root.begin(7, A), 1, 1)
    with pytest.raises(TimeoutError, match=r"0\.02 s no receipt of 1 of 2 ranks, 0; look at"):
        finish(root, A)
    assert root.steps() == []


def test_a_rank_that_failed_is_named_at_once(root):
    place = root.begin(7, A)
    write_failure(place, 1, "OSError: disk on fire")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="1 of 2 ranks failed: rank 1: OSError: disk on fire"):
        finish(root, A, timeout_s=60)
    assert time.monotonic() - start < 10
    assert root.steps() == []


def change(place, rank, edit):
    """Rank's files and receipt, the receipt's entries changed by `edit`."""
    files = files_of(rank, 1)
    place.write_all(files)
    entries = {path: entry(path, data) for path, data in files.items()}
    edit(entries)
    write_receipt(place, rank, entries)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda e: e.pop("model/a/c.1.0"), r"1 of 7 files are missing, the first is model/a/c\.1\.0"),
        (lambda e: e.update({"model/c/c.0": (1, 1)}), r"1 of 7 files are unexpected, the first is model/c/c\.0"),
        (lambda e: e.update({"model/b/c": (1, 1)}), "model/b/c was written by rank 0 and by rank 1"),
        (lambda e: e.update({"model/a/c.1.0": (-1, 1)}), r"\[-1, 1\] of model/a/c\.1\.0 is no \[size, crc\]"),
    ],
)
def test_receipts_that_are_not_the_plan(root, edit, message):
    place = root.begin(7, A)
    write_rank(place, 0, 1)
    change(place, 1, edit)
    with pytest.raises(ValueError, match=message):
        finish(root, A)
    assert root.steps() == []


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"rank": 0, "files": {}}', b"[" * 100_000, b"\xff"])
def test_a_damaged_receipt_is_named(root, text):
    place = root.begin(7, A)
    write_rank(place, 0, 1)
    place.write("receipts/00001.json", text)
    with pytest.raises(ValueError, match=r"receipts/00001\.json"):
        finish(root, A)


def test_attempts_do_not_mix(root):
    write_rank(root.begin(7, A), 0, 1)
    write_rank(root.begin(7, B), 1, 2)
    with pytest.raises(TimeoutError, match="ranks, 1;"):
        finish(root, A)
    with pytest.raises(TimeoutError, match="ranks, 0;"):
        finish(root, B)


def test_the_same_step_again(root):
    save(root, 7, 1, uuid=A)
    save(root, 7, 2, uuid=B)
    assert version_of(root.open(7)) == 2 and root.steps() == [7]
    assert not any(A in name for name in root.files.names())


def test_a_damaged_step_can_be_saved_again(root):
    save(root, 7, 1, uuid=A)
    root.open(7).write("manifest.json", b"{")
    if root.url.startswith(("memory", "file")):
        root.files.write("step-00000007/manifest.json", b"{")
    assert root.latest() is None
    save(root, 7, 2, uuid=B)
    assert version_of(root.open(7)) == 2 and root.latest() == 7


@pytest.mark.parametrize("before", [False, True])
def test_the_slower_of_two_attempts_names_the_winner(root, before):
    if before:
        save(root, 7, 0, uuid="c" * 32)
    for uuid, version in ((A, 1), (B, 2)):
        place = root.begin(7, uuid)
        for rank in range(2):
            write_rank(place, rank, version)
    finish(root, B)
    with pytest.raises(RuntimeError, match=f"committed by another attempt, {B}, while {A} was being written"):
        finish(root, A)
    assert version_of(root.open(7)) == 2


def test_a_swept_attempt_cannot_commit(root):
    place = root.begin(7, A)
    for rank in range(2):
        write_rank(place, rank, 1)
    root.stale_s = 0
    root.sweep()
    for rank in range(2):  # a writer that was only slow: an object store takes what it still writes
        with contextlib.suppress(FileNotFoundError):
            place.write_all(files_of(rank, 1))
    with pytest.raises((TimeoutError, RuntimeError)):
        finish(root, A)
    assert root.steps() == []


class Interloper:
    """As the steps of CrashFs and CrashStore: when `left` steps are done it does something else."""

    left, act = -1, None

    def alive(self):
        pass

    def __call__(self):
        self.left -= 1
        if self.left == -1:
            self.act()


def two_roots(kind, folder, step):
    """The same place twice, the first of which calls `step` before it changes something."""
    where = store(kind, folder)
    if kind == "posix":
        fs = CrashFs()
        fs.step = step
        return CheckpointRoot(where, fs=fs), CheckpointRoot(where)
    return CheckpointRoot(KvCheckpointDir(CrashStore(where._store, step))), CheckpointRoot(where)


def outcome(root, uuid):
    """None if it committed, else what it was told."""
    try:
        finish(root, uuid)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind, again", [("posix", False), ("memory", False), ("memory", True)])
def test_of_two_that_commit_at_once_one_is_told(kind, again, tmp_path):
    """The one commits before every step of the other's commit."""
    winners = set()
    for at in range(100):
        step, told = Interloper(), {}
        first, second = two_roots(kind, tmp_path / str(at), step)
        if again:
            save(second, 7, 0, uuid="c" * 32)
        for uuid, version in ((A, 1), (B, 2)):
            place = second.begin(7, uuid)
            for rank in range(2):
                write_rank(place, rank, version)
        step.left, step.act = at, lambda told=told, root=second: told.update({B: outcome(root, B)})
        told[A] = outcome(first, A)
        if B not in told:  # the first was through before
            break
        (winner,) = [uuid for uuid, error in told.items() if error is None]
        (loser,) = [uuid for uuid, error in told.items() if error is not None]
        assert f"committed by another attempt, {winner}, while {loser}" in told[loser]
        assert version_of(second.open(7)) == {A: 1, B: 2}[winner]
        winners.add(winner)
    assert winners == {A, B} and at > 3
