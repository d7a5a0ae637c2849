"""Asynchronous saves: what reaches the disk is what was there at the call, whoever is killed, and errors surface."""

import multiprocessing as mp
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from core.dist_checkpointing import CheckpointManager, save
from core.dist_checkpointing.format.zarr_metadata import group_metadata
from core.dist_checkpointing.publish.commit import planned_files
from core.dist_checkpointing.writing import async_save
from core.dist_checkpointing.writing.async_save import WriterProgram
from core.dist_checkpointing.writing.job import Job
from core.dist_checkpointing.writing.slab import Slab
from tests.dist_checkpointing import small
from tests.dist_checkpointing.late_device import late_device
from tests.parity.test_checkpoint import digest
from tests.states import state as parallel


@pytest.fixture
def manager(tmp_path, single):
    made = CheckpointManager(tmp_path, ps=single)
    yield made
    made.close()


def spoil(state):
    for tensor in small.tensors(state):
        tensor.data.fill_(-7)


def pid(manager):
    return manager._writer._process.pid


def leftovers(root):
    return [p.name for p in Path(root).iterdir() if p.name.startswith((".tmp", ".trash", ".replaced"))]


def overwritten(root):
    ps = parallel(tp=2)
    manager = CheckpointManager(root, ps=ps, keep_last=9)
    first = small.state(1, ps.rank, 2)
    handle = manager.save_async(1, first)
    spoil(first)
    handle.wait()
    assert handle.done() and handle.stats.bytes > 0 and handle.stats.seconds > 0
    assert 0 < handle.stats.exchange_ms <= handle.stats.stall_ms
    for step in (2, 3, 4):  # nobody waits in between
        made = small.state(step, ps.rank, 2)
        manager.save_async(step, made)
        spoil(made)
    manager.close()
    for step in (1, 2, 3, 4):
        found = small.state(0, ps.rank, 2, empty=True)
        assert manager.load(step, found)["step"] == step
        small.assert_holds(found, step)
    save(small.state(4, ps.rank, 2), f"{root}/plain", ps=ps)


def test_what_is_overwritten_after_the_call_does_not_reach_the_checkpoint(ranks, tmp_path):
    """Two ranks that exchange rows; and the files are those of the synchronous twin."""
    ranks(overwritten, str(tmp_path), world=2)
    assert digest(tmp_path / "step-00000004") == digest(tmp_path / "plain")
    assert not leftovers(tmp_path)


def test_the_slab_grows_with_the_state(manager):
    for step, size in ((1, 10), (2, 100_000), (3, 50)):
        manager.save_async(step, {"a": torch.full((size,), float(step)), "b": torch.full((7,), -float(step))})
        found = {"a": torch.empty(size), "b": torch.empty(7)}
        assert manager.load_latest(found)[0] == step
        assert (found["a"] == step).all() and (found["b"] == -step).all()


def test_growing_keeps_what_is_there():
    slab = Slab()
    slab.reserve(5000)
    slab.array(0, (5000,), "|u1")[:] = 3
    slab.reserve(50_000)
    assert (slab.array(0, (5000,), "|u1") == 3).all() and not slab.array(5000, (45_000,), "|u1").any()
    slab.close()


@pytest.mark.full
def test_busy(tmp_path, single):
    waiting, skipping = (CheckpointManager(tmp_path / w, ps=single, when_busy=w) for w in ("wait", "skip"))
    for manager in (waiting, skipping):
        manager.prepare(small.state(0))
        os.kill(pid(manager), signal.SIGSTOP)
    handle = skipping.save_async(1, small.state(1))
    assert skipping.save_async(2, small.state(2)) is None and not handle.done()
    os.kill(pid(skipping), signal.SIGCONT)
    handle.wait()
    skipping.save_async(3, small.state(3)).wait()
    assert skipping.steps() == [1, 3]
    waiting.save_async(1, small.state(1))
    timer = threading.Timer(0.3, os.kill, (pid(waiting), signal.SIGCONT))
    timer.start()
    second = waiting.save_async(2, small.state(2))
    assert second.stats.stall_ms > 250, "the wait for the first is part of it"
    second.wait()
    assert waiting.steps() == [1, 2]
    for manager in (waiting, skipping):
        manager.close()


def killed(root, who, waits):
    """Rank `who`'s writer is killed with a job in its hands: both ranks hear of it, and go on."""
    ps = parallel(tp=2)
    manager = CheckpointManager(root, ps=ps)
    manager.save(1, small.state(1, ps.rank, 2))
    manager.prepare(small.state(1, ps.rank, 2))
    if ps.rank == who:
        os.kill(pid(manager), signal.SIGSTOP)
    handle = manager.save_async(2, small.state(2, ps.rank, 2))
    if ps.rank == who:
        os.kill(pid(manager), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="the save of step 2 failed") as told:
        handle.wait() if waits else manager.save_async(3, small.state(3, ps.rank, 2))
    assert time.monotonic() - begin < 5
    if (waits and ps.rank == who) or (not waits and who == 0):
        assert "the writer program ended by SIGKILL" in str(told.value)
    if waits:
        assert handle.done()
        handle.wait()  # told once
    manager.save_async(3, small.state(3, ps.rank, 2)).wait()
    found = small.state(0, ps.rank, 2, empty=True)
    assert manager.load_latest(found)[0] == 3 and manager.steps() == [1, 3]
    small.assert_holds(found, 3)
    manager.close()


@pytest.mark.parametrize(
    ("who", "waits"),
    [(0, True), *(pytest.param(*case, marks=pytest.mark.full) for case in [(1, False), (0, False), (1, True)])],
)
def test_a_killed_writer(ranks, tmp_path, who, waits):
    ranks(killed, str(tmp_path), who, waits, world=2)
    assert not leftovers(tmp_path)


def test_a_writer_that_is_dead_before_it_gets_the_job(manager):
    manager.prepare(small.state(1))
    real = manager._writer.copy

    def take(cells):
        real(cells)
        if manager._writer._process.poll() is None:
            manager._writer._process.kill()
            manager._writer._process.wait()

    manager._writer.copy = take
    handle = manager.save_async(1, small.state(1))
    with pytest.raises(RuntimeError, match="the save of step 1 failed: the writer program ended by SIGKILL"):
        handle.wait()
    manager._writer.copy = real
    manager.save_async(2, small.state(2)).wait()
    assert manager.steps() == [2]


def test_a_failed_save_surfaces_at_close(tmp_path, single):
    manager = CheckpointManager(tmp_path, ps=single)
    manager.prepare(small.state(1))
    os.kill(pid(manager), signal.SIGSTOP)
    manager.save_async(1, small.state(1))
    os.kill(pid(manager), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the save of step 1 failed"):
        manager.close()
    again = CheckpointManager(tmp_path, ps=single)  # the lock was given back all the same
    again.save(2, small.state(2))
    again.close()


def trainer(root, pipe):
    """Saves, and is killed with its whole process group, the writer still asleep."""
    os.setsid()
    torch.set_num_threads(1)
    manager = CheckpointManager(root)
    manager.prepare(small.state(1))
    os.kill(pid(manager), signal.SIGSTOP)
    state = small.state(1)
    manager.save_async(1, state)
    pipe.send(pid(manager))
    os.killpg(0, signal.SIGKILL)


@pytest.mark.full
def test_a_killed_trainer_leaves_a_writer_that_commits(ranks, tmp_path, single):
    ranks(abs, -1, world=1)  # the fork server has torch from here on
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=trainer, args=(str(tmp_path), theirs))
    process.start()
    writer = ours.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL and leftovers(tmp_path)
    manager, found, step = CheckpointManager(tmp_path, ps=single), small.state(0, empty=True), []
    waiting = threading.Thread(target=lambda: step.append(manager.load_latest(found)[0]))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "it waits for the writer"
    os.kill(writer, signal.SIGCONT)
    waiting.join(10)
    assert step == [1]
    small.assert_holds(found, 1)
    manager.save(2, small.state(2))  # the lock of the dead job is taken over
    assert manager.steps() == [1, 2] and not leftovers(tmp_path)
    manager.close()


def test_the_writer_never_imports_torch(tmp_path):
    code = (
        "import sys, runpy; sys.argv = ['writer', '0']; sys.stdin.close; "
        "runpy.run_module('core.dist_checkpointing.writing.writer', run_name='__main__'); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'multiprocessing', 'pickle')))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=root, check=True
    )
    assert "torch" not in done.stdout and "multiprocessing" not in done.stdout, done.stdout


def test_a_foreign_package_in_the_working_directory_is_not_the_writer(tmp_path, single, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    manager = CheckpointManager("run", ps=single)
    manager.save_async(1, small.state(1)).wait()
    manager.close()


def program(root, **more):
    """A writer program with one array in its slab, and its job: as rank 0 of 1, if nothing else is said."""
    info = {"a": zarr()}
    job = Job(str(root), "step-00000001", "0" * 32, 0, 1, info, {"paracore": {}}, {}, 24)
    job = Job(**{**vars(job), **more})
    job.begin()
    writer = WriterProgram(None)
    writer.start(64)
    writer.copy([("a", (0,), ((0, 6),), np.arange(6, dtype="<f4"))])
    return writer, job


def zarr():
    from core.dist_checkpointing.format.arrays import ArrayInfo
    from core.dist_checkpointing.format.zarr_metadata import array_metadata

    return array_metadata(ArrayInfo((6,), "float32"), (6,), None)


def test_a_rank_that_is_silent_is_named_at_the_time_limit(tmp_path):
    writer, job = program(tmp_path, world_size=2, timeout_s=0.5)
    writer.begin(job)
    with pytest.raises(TimeoutError, match="is not written after 0 s"):
        writer.wait(0.0)
    error, seconds = writer.wait()
    assert "no receipt of 1 of 2 ranks, 1;" in error and 0.4 < seconds < 2
    assert planned_files(group_metadata(job.metadata, {})) == {"zarr.json"}
    writer.close()


def test_a_writer_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(async_save, "MARGIN_S", 0.2)
    writer, job = program(tmp_path, timeout_s=0.1)
    os.kill(writer._process.pid, signal.SIGSTOP)
    writer.begin(job)
    error, seconds = writer.wait()
    assert "the writer program ended by SIGKILL" in error and seconds < 2
    writer.start(64)  # and is there again
    assert writer._process.poll() is None
    writer.close()


def test_disk_full_in_the_writer(manager):
    """Bytes needed and free are told, the older step is intact."""
    big = {"w": torch.ones(100_000)}
    manager.save(1, small.state(1))
    manager.prepare(big)
    limits = resource.prlimit(pid(manager), resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match=r"step 2 failed: DiskFullError.* bytes needed, \d+ free; the older"):
        manager.save_async(2, big).wait()
    resource.prlimit(pid(manager), resource.RLIMIT_FSIZE, limits)
    found = small.state(0, empty=True)
    assert manager.load_latest(found)[0] == 1 and not leftovers(manager.root)
    manager.save_async(2, big).wait()
    assert manager.steps() == [1, 2]


def start_fails(root):
    ps = parallel(tp=2)
    manager = CheckpointManager(root, ps=ps)
    manager._program()
    if ps.rank == 1:
        manager._writer.start = lambda size: (_ for _ in ()).throw(OSError(12, "no memory for the slab"))
    with pytest.raises(OSError, match="no memory for the slab" if ps.rank == 1 else "rank 1: .*no memory"):
        manager.save_async(1, small.state(1, ps.rank, 2))
    manager._writer.start = type(manager._writer).start.__get__(manager._writer)
    manager.save_async(1, small.state(1, ps.rank, 2)).wait()
    manager.close()


def test_a_rank_without_memory_for_the_slab(ranks, tmp_path):
    ranks(start_fails, str(tmp_path), world=2)
    assert (tmp_path / "step-00000001").exists()


def copies_aside(root):
    """As on an accelerator: a thread copies, slowly; then one that fails on rank 1."""
    ps, real, lost = parallel(tp=2), WriterProgram.copy, []

    def take(self, cells):
        time.sleep(0.2)
        if lost:
            raise RuntimeError("the device is gone")
        real(self, cells)

    manager = CheckpointManager(root, ps=ps, timeout_s=20)
    manager.prepare(small.state(1, ps.rank, 2))
    with late_device() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriterProgram, "copy", take)
        first = small.state(1, ps.rank, 2)
        manager.save_async(1, first)
        manager.before_update()
        device.current.ask(lambda: spoil(first))
        device.current.run()
        second = manager.save_async(2, small.state(2, ps.rank, 2))
        second.wait()
        third = manager.save_async(3, small.state(3, ps.rank, 2))
        if ps.rank == 1:
            lost.append(True)
        manager.before_update()  # the training step goes on
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"step 3 failed: .*(RuntimeError: the device is gone)"):
            third.wait()
        assert time.monotonic() - begin < 5
    manager.save_async(4, small.state(4, ps.rank, 2)).wait()
    found = small.state(0, ps.rank, 2, empty=True)
    for step in (1, 2, 4):
        manager.load(step, found)
        small.assert_holds(found, step)
    assert manager.steps() == [1, 2, 4]
    manager.close()


@pytest.mark.full
def test_a_copy_beside_the_step(ranks, tmp_path):
    ranks(copies_aside, str(tmp_path), world=2)


def test_a_store_in_this_process_cannot_be_written_by_another(single):
    manager = CheckpointManager("memory://async", ps=single)
    with pytest.raises(ValueError, match="lives in this process, the writer is another one: use save"):
        manager.save_async(1, small.state(1))
    manager.close()
