"""Killed at every step, and losing power at every step: the newest checkpoint is always whole, the old or the new."""

import os
import random
import shutil
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest
import tensorstore as ts

from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot, step_name
from core.dist_checkpointing.publish.index import heartbeat, trash
from core.dist_checkpointing.storage.kv_checkpoint_dir import KvCheckpointDir
from tests.dist_checkpointing.crash import CrashFs, CrashStore, Disk, Killed, Steps
from tests.dist_checkpointing.toy import files_beside_the_index, save, version_of, write_rank
from tests.marks import FULL, PRODUCT


class Story:
    """Everything that changes a directory of checkpoints, as chapters: what is done, what the newest may be after."""

    def __init__(self, root):
        self.root = root
        self.forgotten, self.abandoned = uuid4().hex, uuid4().hex

    def chapters(self):
        yield {None, 10}, lambda: save(self.root, 1, 10)
        yield {10, 20}, lambda: save(self.root, 2, 20)
        yield {20, 21}, lambda: save(self.root, 2, 21)  # the same step again
        yield {21}, lambda: self.root.tag("best", 2)
        yield {21, 30}, lambda: save(self.root, 3, 30)
        yield {30}, lambda: self.root.begin(4, self.forgotten)
        yield {30}, self.root.sweep
        yield {30}, lambda: write_rank(self.root.begin(4, self.abandoned), 0, 40)
        yield {30}, lambda: self.root.abandon(4, self.abandoned)
        yield {30}, lambda: self.root.retain(keep_last=1)

    def tell(self, log=()):
        """Tells it until it is killed. `allowed`: what may be found then; `marks`: and from where in `log` on."""
        self.allowed, self.marks = {None}, []
        for allowed, chapter in self.chapters():
            self.allowed = allowed
            self.marks.append((len(log), allowed))
            chapter()


def posix(folder, at=None):
    """(root that dies at step `at`, its steps, what makes the same root as the next job sees it), all fresh."""
    shutil.rmtree(folder / "top", ignore_errors=True)
    (folder / "top").mkdir()
    fs, path = CrashFs(at), folder / "top" / "runs" / "root"
    return CheckpointRoot(path, fs=fs, stale_s=0), fs.step, lambda: CheckpointRoot(path, fs=CrashFs(), stale_s=0)


def kv(folder, at=None):
    store, step = ts.KvStore.open("memory://steps/").result(), Steps(at)
    return (
        CheckpointRoot(KvCheckpointDir(CrashStore(store, step)), stale_s=0),
        step,
        lambda: CheckpointRoot(KvCheckpointDir(store), stale_s=0),
    )


@pytest.fixture
def folder(tmp_path):
    """In memory where there is such a directory: thousands of files are made."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as path:
        yield Path(path)


def newest(root):
    """What a new job would load, checked by an oracle and by ourselves."""
    step = root.latest()
    if step is None:
        return None
    assert root.problems(step, digests=True) == []
    return version_of(root.open(step))


def assert_sound(root, allowed):
    """What the next job finds; what it sweeps leaves nothing behind."""
    assert newest(root) in allowed
    for step in root.steps():
        version_of(root.open(step))
    root.sweep()
    assert newest(root) in allowed
    if 30 in allowed:  # the chapters behind the tag's
        assert root.tags() == {"best": 2}
    named = set(map(step_name, root.steps()))
    assert {name.split("/")[0] for name in files_beside_the_index(root)} <= {"tags", *named}
    assert_index(root)


def assert_index(root):
    """An entry for each step; a mark is left of one that was killed next to its pointer only, and nobody minds it."""
    if not isinstance(root.files, KvCheckpointDir):
        return
    named = {step_name(step): root._strategy.identity(step_name(step)) for step in root.steps()}
    index = {".index.json", *(f".index/{name}/taken" for name in named)}
    left = {mark(name, uuid) for name, uuid in named.items() for mark in (heartbeat, trash)}
    assert index <= set(root.files.names()) - set(files_beside_the_index(root)) <= index | left


def assert_goes_on(root):
    """The next job saves and retains as if nothing had been."""
    save(root, 5, 50)
    root.retain(keep_last=1)
    assert newest(root) == 50
    assert root.steps() == [*root.tags().values(), 5]
    root.sweep()
    assert_index(root)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("world", [posix, kv])
def test_killed_at_every_step(world, every, folder):
    root, steps, again = world(folder)
    Story(root).tell()
    assert_sound(again(), {30})
    for at in range(0, steps.count, every):
        root, _, again = world(folder, at)
        story = Story(root)
        with pytest.raises(Killed):
            story.tell()
        assert_sound(again(), story.allowed)
        assert_goes_on(again())


def oldest(states):
    return states[0]


def latest(states):
    return states[-1]


def any_of(seed):
    return random.Random(seed).choice


LOSSES = {  # what survives of content, of names
    "nothing unsynced": (oldest, oldest),
    "names only": (oldest, latest),
    "content only": (latest, oldest),
    **{f"random {seed}": (any_of(seed), any_of(seed + 100)) for seed in range(2)},
}


SHORT = ("nothing unsynced", "names only")


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("loss", [k if k in SHORT else pytest.param(k, marks=pytest.mark.full) for k in LOSSES])
def test_power_lost_at_every_step(loss, every, folder):
    root, _, _ = posix(folder)
    disk, left, log = Disk(folder / "top"), folder / "left", root.files.fs.log
    story = Story(root)
    story.tell(log)
    for number, change in enumerate([*log, None]):
        if number % every == 0 or change is None:
            disk.after_power_loss(left, *LOSSES[loss])
            allowed = [allowed for start, allowed in story.marks if start <= number][-1]
            assert_sound(CheckpointRoot(left / "runs" / "root", fs=CrashFs(), stale_s=0), allowed)
            shutil.rmtree(left)
        if change:
            disk.apply(change)


@pytest.mark.parametrize("every", [pytest.param(4, marks=FULL), pytest.param(1, marks=PRODUCT)])
def test_killed_again_while_it_recovers(every, folder):
    """Every step of the sweep that follows a kill at these steps."""
    root, steps, _ = posix(folder)
    Story(root).tell()
    points = 0
    for at in range(0, steps.count, every):
        again_at, left = 0, folder / "left"
        root, _, again = posix(folder, at)
        story = Story(root)
        with pytest.raises(Killed):
            story.tell()
        shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(folder / "top", left)
        while True:
            fs = CrashFs(again_at)
            try:
                CheckpointRoot(folder / "top" / "runs" / "root", fs=fs, stale_s=0).sweep()
                break
            except Killed:
                assert_sound(again(), story.allowed)
                again_at, points = again_at + 1, points + 1
                shutil.rmtree(folder / "top")
                shutil.copytree(left, folder / "top")
    assert points > 1000 / every
