"""What an object store is asked: as many objects as there are steps, never all that lie there; and no clock."""

import json
import math
import time
from contextlib import suppress
from itertools import count

import pytest

from core.dist_checkpointing import CheckpointManager
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.index import Watch
from core.dist_checkpointing.publish.lock import Heartbeat
from core.dist_checkpointing.storage.checkpoint_dir import open_dir
from core.dist_checkpointing.storage.kv_checkpoint_dir import KvCheckpointDir
from tests.dist_checkpointing.crash import CrashStore, Killed, Steps
from tests.dist_checkpointing.toy import committed, save, store, version_of, write_rank

A, B = "a" * 32, "b" * 32


@pytest.fixture
def place(tmp_path):
    return store("memory", tmp_path)


class Counted:
    """A store that counts what it is asked: reads, lists, and keys that were listed."""

    def __init__(self, store, told=None):
        self._store, self.told = store, {"reads": 0, "lists": 0, "keys": 0} if told is None else told
        self.url, self.spec, self.write, self.delete_range = store.url, store.spec, store.write, store.delete_range

    def __truediv__(self, name):
        return Counted(self._store / name, self.told)

    def read(self, *arguments, **options):
        self.told["reads"] += 1
        return self._store.read(*arguments, **options)

    def list(self, *arguments, **options):
        found = self._store.list(*arguments, **options)
        self.told["lists"] += 1
        self.told["keys"] += len(found.result())
        return found


def asked(place, do):
    """What `do` asks, and what it returns."""
    counted = Counted(place._store)
    return do(CheckpointRoot(KvCheckpointDir(counted))), counted.told


def test_what_is_asked_grows_with_the_steps_only(place):
    root, steps = CheckpointRoot(place), range(20)
    for step in steps:
        save(root, step, step)
        root.open(step).write_all({f"model/c.{n}": b"" for n in range(30)})
    root.sweep()
    found, told = asked(place, CheckpointRoot.steps)
    assert found == list(steps) and told["reads"] <= 1.1 * 20 + 5 and told["keys"] <= 20
    for look in (CheckpointRoot.leftovers, CheckpointRoot.sweep, lambda root: root.wait_for_writers(1)):
        _, told = asked(place, look)
        assert told["reads"] <= 1.1 * 20 + 5 and told["lists"] <= 4 and told["keys"] <= 3 * 20
    removed, told = asked(place, lambda root: root.retain(keep_last=19))
    assert removed == [0] and told["reads"] < 150 and told["keys"] <= 100, "files of one step, entries of all"


def as_before_there_was_an_index(place):
    """What a version without an index leaves."""
    for name in place.names():
        if name.startswith(".index"):
            if name.endswith((".heartbeat", ".trash")):
                place.write(name.removeprefix(".index/"), place.read(name))
            place.remove(name)


def test_a_store_of_before(place):
    root = CheckpointRoot(place, stale_s=0)
    for step in (1, 2):
        save(root, step, step)
    write_rank(root.begin(3, A), 0, 3)
    as_before_there_was_an_index(place)
    assert not place.names(".index") and CheckpointRoot(place).steps() == [1, 2]
    save(CheckpointRoot(place), 4, 4)  # as a plain save does: nothing is swept before
    assert CheckpointRoot(place).steps() == [1, 2, 4] and version_of(CheckpointRoot(place).open(1)) == 1
    assert root.leftovers() == [f"step-00000003/{A}"]
    assert root.sweep() == [f"step-00000003/{A}"] and root.leftovers() == []
    assert not any(A in name for name in place.names())
    found, told = asked(place, CheckpointRoot.steps)
    assert found == [1, 2, 4] and told["keys"] == 3


def test_killed_while_the_index_is_made(tmp_path):
    """At each of its writes: no step is hidden, and the next job makes the rest."""
    for at in range(30):
        place, steps = store("memory", tmp_path), Steps(at)
        for step in (1, 2, 3):
            save(CheckpointRoot(place), step, step)
        as_before_there_was_an_index(place)
        try:
            CheckpointRoot(KvCheckpointDir(CrashStore(place._store, steps))).sweep()
        except Killed:
            assert CheckpointRoot(place).steps() == [1, 2, 3]
            save(CheckpointRoot(place), 4, 4)
            assert CheckpointRoot(place).steps() == [1, 2, 3, 4]
        else:
            break
        CheckpointRoot(place).sweep()
        assert asked(place, CheckpointRoot.steps)[1]["keys"] == 4 and CheckpointRoot(place).steps() == [1, 2, 3, 4]
    assert at == 4, "an entry for each step, and that these are all"


def test_what_the_index_does_not_tell_is_found_by_prune(single, capsys):
    """Another version saved meanwhile, and was killed while it did."""
    url = "memory://index/prune"
    root, place = CheckpointRoot(url), open_dir(url)
    save(root, 1, 1)
    root.sweep()
    save(root, 2, 2)
    place.remove(".index/step-00000002/taken")
    write_rank(root.begin(3, A), 0, 3)
    place.write(f"step-00000003/{A}.heartbeat", place.read(f".index/step-00000003/{A}.heartbeat"))
    for name in (f"{A}.heartbeat", "taken"):
        place.remove(f".index/step-00000003/{name}")
    assert CheckpointRoot(url).steps() == [1] and CheckpointRoot(url).leftovers() == []
    with pytest.MonkeyPatch.context() as patch:
        target = "core.dist_checkpointing.tools.steps.CheckpointRoot"
        patch.setattr(target, lambda url: CheckpointRoot(url, stale_s=0.2))
        assert main(["prune", url, "--keep-last", "5", "--dry-run"]) == 0
        assert f"would remove step-00000003/{A}" in capsys.readouterr().out
        assert main(["prune", url, "--keep-last", "5"]) == 0
    assert CheckpointRoot(url).steps() == [1, 2] and not any(A in name for name in place.names())


def test_objects_of_a_user(place):
    """An entry without a checkpoint, and a file that is called as the index is."""
    users = {".index/mine/taken": b"x", ".index/mine/notes": b"y", ".index.json": b"{}"}
    place.write_all(users)
    root = CheckpointRoot(place, stale_s=0)
    save(root, 1, 1)
    root.sweep()
    assert root.steps() == [1]
    assert {name: place.read(name) for name in (".index/mine/notes", ".index.json")} == {
        name: users[name] for name in (".index/mine/notes", ".index.json")
    }


def retain(root):
    root.retain(keep_last=1)


def give_up(root):
    root.abandon(3, B)


@pytest.mark.parametrize(
    "remove, saved", [(retain, 1), (CheckpointRoot.sweep, 1), (CheckpointRoot.sweep, 3), (give_up, 3)]
)
@pytest.mark.parametrize("first", ["the save", "the removal"])
def test_a_step_that_is_saved_while_its_name_is_freed_is_not_hidden(remove, saved, first, tmp_path):
    """One job saves a step, another removes it or an attempt at it; the one acts between two writes of the other."""
    for at in range(60):
        place, did = store("memory", tmp_path), count()
        root = CheckpointRoot(place)
        save(root, 1, 1)
        save(root, 2, 2)
        root.sweep()
        root.begin(3, B)

        def saves(place):
            with suppress(RuntimeError, FileNotFoundError):
                save(CheckpointRoot(place), saved, 7, uuid=A)

        def removes(place):
            remove(CheckpointRoot(place, stale_s=0 if first == "the removal" else 60))

        slow, quick = (removes, saves) if first == "the removal" else (saves, removes)

        def step(at=at, did=did, place=place, quick=quick):
            if next(did) == at:
                quick(place)

        slow(KvCheckpointDir(CrashStore(place._store, step)))
        found = CheckpointRoot(place)
        assert found.steps() == [int(name[5:]) for name in found._strategy._index.names(thorough=True)]
        if next(did) <= at:
            break
    assert 1 < at < 59


@pytest.mark.parametrize("clock", [1.0, 1e10])
def test_clocks_of_other_hosts_are_not_believed(clock, place):
    """One that is years behind, or ahead: what it writes stands while it changes, and goes when it does not."""
    root = CheckpointRoot(place, stale_s=30)
    write_rank(root.begin(2, A), 0, 2)
    key, clocks = f".index/step-00000002/{A}.heartbeat", count()

    def beat():
        place.write(key, json.dumps(json.loads(place.read(key)) | {"time": clock + 1e-3 * next(clocks)}).encode())

    beat()
    before = place.read(key)
    assert root.sweep() == []
    with Heartbeat(beat, every=0.01):
        while place.read(key) == before:
            time.sleep(0.01)
        assert root.sweep() == [] and root.leftovers() == []
    root.stale_s = 0.2
    root.wait_for_writers(30)
    assert root.sweep() == [f"step-00000002/{A}"]


def test_a_watch():
    watch = Watch()
    assert watch.unchanged("x", b"1") == 0 == watch.unchanged("y", b"1")
    time.sleep(0.01)
    assert 0.01 <= watch.unchanged("x", b"1") < math.inf
    assert watch.unchanged("x", b"2") == 0
    watch.forget("y")
    assert watch.unchanged("y", b"1") == 0


def test_prune_waits_for_what_may_be_written(place):
    root = CheckpointRoot(place, stale_s=30)
    root.begin(2, A)
    with root.beating(2, A, every=0.01):
        begin = time.monotonic()
        root._strategy.watch(30, poll_s=0.05)
        assert time.monotonic() - begin < 20, "it beats"
    root.stale_s = 0.2
    root._strategy.watch(0.2, poll_s=0.05)
    assert root.leftovers() == [f"step-00000002/{A}"]


def test_a_run_in_an_object_store(single):
    url = "memory://index/run"
    manager = CheckpointManager(url, ps=single, keep_last=2)
    for step in (1, 2, 3):
        manager.save(step, {"a": step})
    assert manager.steps() == [2, 3] and manager.load_latest({"a": 0}) == (3, {"a": 3})
    manager.close()
    index = [name for name in open_dir(url).names() if name.startswith(".index")]
    assert index == [".index.json", ".index/step-00000002/taken", ".index/step-00000003/taken"]


def test_an_entry_that_goes_meanwhile_is_there_at_the_commit(place):
    """S3 deletes without a condition, and perhaps late."""
    root = CheckpointRoot(place)
    root.sweep()
    attempt = root.begin(1, A)
    for rank in range(2):
        write_rank(attempt, rank, 7)
    place.remove(".index/step-00000001/taken")
    committed(root, 1, A)
    assert CheckpointRoot(place).steps() == [1]


def test_an_attempt_that_waits_long_keeps_its_name(place):
    """The checkpoint it shall replace is removed meanwhile."""
    root = CheckpointRoot(place)
    save(root, 1, 1)
    save(root, 2, 2)
    root.sweep()
    attempt = root.begin(1, A)
    for rank in range(2):
        write_rank(attempt, rank, 7)
    assert root.retain(keep_last=1) == [1] and root.steps() == [2]
    with suppress(RuntimeError):
        committed(root, 1, A)
    assert CheckpointRoot(place).steps() == [int(name[5:]) for name in root._strategy._index.names(thorough=True)]
