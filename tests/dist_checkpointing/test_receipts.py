"""Receipts of many ranks: the first of each 64 merges theirs, and whoever commits reads those."""

import json
import threading
import time
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from core.dist_checkpointing import load
from core.dist_checkpointing.publish import commit as committing
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.commit import (
    commit,
    merge_receipts,
    receipts_folder,
    write_failure,
    write_receipt,
)
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from core.dist_checkpointing.writing.saving import Saver
from tests.dist_checkpointing import small, test_crash
from tests.dist_checkpointing.test_async_save import program
from tests.dist_checkpointing.test_crash import folder, kv, posix  # noqa: F401
from tests.dist_checkpointing.toy import METADATA, STORES, entry, files_of, store
from tests.states import state as parallel

A = "a" * 32


def fan_in(number):
    return mock.patch.object(committing, "FAN_IN", number)


# thousands of ranks, counted


class Files:
    """A place of nothing but names and contents, that counts who asks it for what."""

    url = "counted/"

    def __init__(self):
        self.folders, self.count = {}, Counter()

    def write(self, name, data):
        at, _, name = name.rpartition("/")
        if at == "receipts":  # rank 0 may commit as soon as it is there
            assert f"{A}.receipts/{name.removesuffix('.json')}" not in self.folders
        self.folders.setdefault(at, {})[name] = data

    def make_folder(self, name):
        self.folders.setdefault(name, {})

    def remove_folder(self, name):
        gone = [at for at in self.folders if at == name or at.startswith(f"{name}/")]
        self.count["removed"] += sum(len(self.folders.pop(at)) for at in gone)

    def names(self, prefix=""):
        self.count["listings"] += 1
        self.count["names"] += len(self.folders.get(prefix, ()))
        return [f"{prefix}/{name}" for name in self.folders.get(prefix, ())]

    def read(self, name):
        self.count["reads"] += 1
        at, _, name = name.rpartition("/")
        return self.folders[at][name]

    @contextmanager
    def counted(self):
        self.count = Counter()
        yield self.count


@pytest.mark.parametrize("world", [64, 65, 1000, 16384])
def test_nobody_opens_more_than_a_group_and_the_groups(world):
    place, published = Files(), {}
    root = SimpleNamespace(
        temporary=lambda name, uuid: place,
        is_begun=lambda name, uuid: True,
        publish=lambda name, uuid, manifest, files: published.update(files),
    )
    for rank in range(world):
        write_receipt(place, rank, {f"c.{rank}": (rank, 1)}, receipts_folder(A, rank, world))
    most = Counter()
    for rank in range(1, world):
        with place.counted() as count:
            merge_receipts(root, 7, A, rank, world, 1)
        most |= count
    if world > 64:
        assert most["reads"] <= most["removed"] <= 64 and most["listings"] <= 2
    with place.counted() as count:
        merge_receipts(root, 7, A, 0, world, 1)
        commit(root, 7, A, {f"c.{rank}" for rank in range(world)}, world_size=world, run={}, timeout_s=1)
    assert count["reads"] <= 64 + world / 64 + 1 and count["listings"] <= 4 and count["names"] <= 128 + world / 32
    assert not [at for at in place.folders if at != "receipts" and place.folders[at]]
    receipts = {name for name in published if name.startswith("receipts/")}
    assert receipts == {f"receipts/{rank:05d}.json" for rank in range(0, world, 64 if world > 64 else 1)}
    assert len(published) == world + len(receipts)


# on real stores


@pytest.fixture(params=STORES)
def root(request, tmp_path):
    return CheckpointRoot(store(request.param, tmp_path))


def write(place, rank, world, edit=lambda entries: None):
    """Ranks beyond the second have nothing to write."""
    files = files_of(rank, 1) if rank < 2 else {}
    place.write_all(files)
    entries = {path: entry(path, data) for path, data in files.items()}
    edit(entries)
    write_receipt(place, rank, entries, receipts_folder(A, rank, world))


def finish(root, world, timeout_s=0.02):
    planned = committing.planned_files(METADATA)
    return commit(root, 7, A, planned, world_size=world, run={}, timeout_s=timeout_s)


def test_a_save_of_five_ranks_in_pairs(root):
    """The ranks are done in any order, and whoever merges waits for his own."""
    with fan_in(2):
        place = root.begin(7, A)
        merging = [
            threading.Thread(target=merge_receipts, args=(root, 7, A, rank, 5, 10)) for rank in reversed(range(5))
        ]
        for thread in merging:
            thread.start()
        for rank in (3, 0, 4, 2, 1):
            write(place, rank, 5)
        finish(root, 5, timeout_s=10)
        for thread in merging:
            thread.join()
    place = root.open(7)
    receipts = [name for name in place.names() if "receipts" in name]
    assert receipts == [f"receipts/{rank:05d}.json" for rank in (0, 2, 4)]
    assert json.loads(place.read(receipts[0]))["files"].keys() == {*files_of(0, 1), *files_of(1, 1)}
    manifest = json.loads(place.read("manifest.json"))
    assert set(place.names()) == {*manifest["files"], "manifest.json"} and check(place, digests=True) == []


def test_silent_ranks_are_named(root):
    with fan_in(2):
        place = root.begin(7, A)
        for rank in (0, 1, 2):
            write(place, rank, 5)
        merge_receipts(root, 7, A, 0, 5, 1)
        with pytest.raises(TimeoutError, match=r"no receipt of 1 of 5 ranks, 3; look"):
            merge_receipts(root, 7, A, 2, 5, 0.02)
        with pytest.raises(TimeoutError, match=r"no receipt of 2 of 5 ranks, 3, 4; look"):
            finish(root, 5)


def test_a_rank_that_failed_is_named_at_once(root):
    with fan_in(2):
        place = root.begin(7, A)
        write(place, 2, 4)
        write_failure(place, 3, "OSError: disk on fire")
        begin = time.monotonic()
        for act in (lambda: merge_receipts(root, 7, A, 2, 4, 60), lambda: finish(root, 4, 60)):
            with pytest.raises(RuntimeError, match="1 of 4 ranks failed: rank 3: OSError: disk on fire"):
                act()
        assert time.monotonic() - begin < 60 and root.steps() == []


def test_what_two_ranks_wrote_is_told(root):
    with fan_in(2):
        place = root.begin(7, A)
        write(place, 0, 4)
        write(place, 1, 4, lambda entries: entries.update({"model/b/c": (1, 1)}))
        with pytest.raises(ValueError, match="model/b/c was written by rank 0 and by rank 1"):
            merge_receipts(root, 7, A, 0, 4, 1)


def test_nobody_waits_for_an_attempt_that_was_given_up(root):
    with fan_in(2):
        write(root.begin(7, A), 2, 4)
        root.abandon(7, A)
        with pytest.raises(RuntimeError, match="given up; rank 0 tells why"):
            merge_receipts(root, 7, A, 2, 4, 60)


# killed


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("world", [posix, kv])
def test_killed_while_receipts_are_merged(world, every, folder):  # noqa: F811
    with fan_in(1):
        test_crash.test_killed_at_every_step(world, every, folder)


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.full)])
def test_power_lost_while_receipts_are_merged(every, folder):  # noqa: F811
    with fan_in(1):
        test_crash.test_power_lost_at_every_step("names only", every, folder)


# both kinds of saves


def in_pairs(root):
    ps = parallel(tp=4)
    with fan_in(2):
        Saver(root, ps, durable=False).save("x", small.state(3, ps.rank, 4))
    found = small.state(3, ps.rank, 4, empty=True)
    load(found, f"{root}/x", ps=ps)
    small.assert_holds(found, 3)


def test_a_plain_save(ranks, tmp_path):
    ranks(in_pairs, str(tmp_path), world=4)
    assert [p.name for p in sorted((tmp_path / "x" / "receipts").iterdir())] == ["00000.json", "00002.json"]
    assert check(open_checkpoint_dir(tmp_path / "x"), full=True) == []
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def fails_to_merge(root):
    ps = parallel(tp=4)

    def broken(*told, **more):
        raise OSError(5, "the cable is out")

    begin = time.monotonic()
    merging = mock.patch.object(committing, "_union", broken if ps.rank == 2 else committing._union)
    told = pytest.raises((OSError, RuntimeError), match=r"(?:rank 2: .*|^\[Errno 5\] )the cable is out")
    with fan_in(2), merging, told:
        Saver(root, ps, durable=False).save("x", small.state(3, ps.rank, 4))
    assert time.monotonic() - begin < 300, "nobody waits for the time limit"


def test_a_plain_save_whose_merging_fails(ranks, tmp_path):
    ranks(fails_to_merge, str(tmp_path), world=4)
    assert list(tmp_path.iterdir()) == []


def test_the_writer_program_merges(tmp_path):
    """Rank 0 of 65, which merges and commits; the others are told here."""
    world, uuid = 65, "0" * 32
    writer, job = program(tmp_path, world_size=world, timeout_s=60)
    writer.begin(job)
    place = CheckpointRoot(str(tmp_path)).temporary(job.name, uuid)
    for rank in range(1, world):
        write_receipt(place, rank, {}, receipts_folder(uuid, rank, world))
    merge_receipts(CheckpointRoot(str(tmp_path)), job.name, uuid, 64, world, 60)
    error, _ = writer.wait()
    writer.close()
    assert error is None
    place = open_checkpoint_dir(tmp_path / job.name)
    assert not any("receipts" in line or "a/c" in line for line in check(place, full=True))
    assert np.frombuffer(place.read("a/c.0")[:24], "<f4").tolist() == [*range(6)]
    assert [name for name in place.names() if "receipts" in name] == ["receipts/00000.json", "receipts/00064.json"]
