"""Writer programs whose job is gone: they finish what can be finished, and leave. And their logs."""

import multiprocessing as mp
import os
import signal
import time
from pathlib import Path

import pytest

from core.dist_checkpointing import CheckpointManager
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.commit import write_receipt
from core.dist_checkpointing.publish.lock import Orphaned, OtherRanks
from core.dist_checkpointing.writing.job import Job
from core.dist_checkpointing.writing.writer import MAX_LOG_BYTES
from tests.dist_checkpointing import toy
from tests.dist_checkpointing.test_async_save import program

UUID = "0" * 32  # of the job of `program`


def test_who_beats_is_waited_for():
    orphaned, beats = [], []
    others = OtherRanks(lambda: bool(orphaned), lambda: str(len(beats)), silent_s=0.05)
    others()
    time.sleep(0.1)
    others()  # the job is there
    orphaned.append(True)
    for _ in range(5):
        beats.append(None)
        others()
        time.sleep(0.06)
    with pytest.raises(Orphaned, match="the job is gone, and no other rank was heard of"):
        others()


def test_an_orphan_gives_up_its_own_attempt_alone(tmp_path):
    """In this process, as rank 0 of 2; another attempt, a step and a user's file stay."""
    root = CheckpointRoot(tmp_path)
    toy.save(root, 2, 1)
    root.begin(1, "b" * 32)
    (tmp_path / "notes.txt").write_text("mine")
    before = set(os.listdir(tmp_path))
    writer, job = program(tmp_path, world_size=2, timeout_s=600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "core.dist_checkpointing.publish.checkpoint_root.OtherRanks",
            lambda *told: OtherRanks(*told, silent_s=0.1),
        )
        with pytest.raises(Orphaned):
            job.conclude(lambda: True)
    job.abandon()
    writer.close()
    assert set(os.listdir(tmp_path)) == before


def trainer(root, pipe, rank):
    """Hands over its share as one of two ranks, and is killed while its writer waits for the other."""
    if rank:
        patch = pytest.MonkeyPatch()
        patch.setattr(Job, "begin", lambda job: None)
    writer, job = program(root, world_size=2, timeout_s=600, rank=rank)
    writer.begin(job)
    pipe.send(writer._process.pid)
    while not (Path(root) / f".tmp-step-00000001-{UUID}" / "receipts" / f"{rank:05d}.json").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def orphan(ranks, root, rank=0):
    """The pid of a writer program whose trainer was killed."""
    ranks(abs, -1, world=1)  # the fork server has torch from here on
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=trainer, args=(str(root), theirs, rank))
    process.start()
    pid = ours.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return pid


def is_there(pid):
    """Whether a process, which may be waited for by nobody, has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(done, seconds=120):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.full
def test_a_writer_leaves_when_its_job_is_gone(ranks, tmp_path):
    """It would wait for a receipt that nobody writes, for ten minutes."""
    root = CheckpointRoot(tmp_path)
    toy.save(root, 2, 1)
    root.begin(1, "b" * 32)
    before = set(os.listdir(tmp_path))
    pid = orphan(ranks, tmp_path)
    wait_until(lambda: not is_there(pid))
    assert set(os.listdir(tmp_path)) == before and toy.version_of(root.open(2)) == 1


@pytest.mark.full
def test_a_writer_waits_for_ranks_that_go_on(ranks, tmp_path):
    """The writer of another rank outlives the job, too: what both have written is a checkpoint."""
    pid = orphan(ranks, tmp_path)
    root = CheckpointRoot(tmp_path)
    with root.beating(1, UUID, every=0.2):
        time.sleep(7)
        assert is_there(pid) and root.steps() == []
        write_receipt(root.temporary(1, UUID), 1, {})
        wait_until(lambda: root.steps() == [1])
    wait_until(lambda: not is_there(pid))


@pytest.mark.full
def test_a_writer_that_does_not_commit_leaves_and_leaves_all(ranks, tmp_path):
    Job(str(tmp_path), "step-00000001", UUID, 0, 2, {}, {}, {}, 24).begin()
    pid = orphan(ranks, tmp_path, rank=1)
    wait_until(lambda: not is_there(pid))
    left = os.listdir(tmp_path / f".tmp-step-00000001-{UUID}" / "receipts")
    assert left == ["00001.json"], "the committer may only be slow"


@pytest.mark.full
def test_a_log_does_not_grow_for_ever(tmp_path, single):
    log = tmp_path / ".logs" / "writer-00000.log"
    log.parent.mkdir()
    log.write_text("".join(f"line {n} of before\n" for n in range(100_000)))
    assert log.stat().st_size > MAX_LOG_BYTES
    manager = CheckpointManager(tmp_path, ps=single)
    manager.save_async(1, {"a": 1}).wait()
    manager.close()
    told = log.read_text().splitlines()
    assert log.stat().st_size < MAX_LOG_BYTES / 2
    assert told[0].startswith("line ") and "line 99999 of before" in told and "step-00000001: done after" in told[-1]
    before = len(told)
    manager.save_async(2, {"a": 1}).wait()
    manager.close()
    assert len(log.read_text().splitlines()) == before + 2, "as long as it is short, all of it stays"
