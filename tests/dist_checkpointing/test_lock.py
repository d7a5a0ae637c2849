"""One job per directory: who has the lock, who may take it."""

import gc
import json
import os
import socket
import subprocess
import sys
import time
import weakref
from itertools import count

import pytest

from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.lock import Heartbeat, Lock
from core.dist_checkpointing.storage.checkpoint_dir import PosixCheckpointDir
from tests.dist_checkpointing.toy import STORES, store


@pytest.fixture(params=STORES)
def files(request, tmp_path):
    root = CheckpointRoot(store(request.param, tmp_path))
    root.lock().release()  # the directory is there
    return root.files


def edit(files, **changes):
    """The lock as another job would have written it."""
    owner = json.loads(files.read(".lock")) | changes
    files.write(".lock", json.dumps(owner).encode())


def dead_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_the_second_is_told_who_is_in(files):
    lock = Lock(files)
    told = rf"in use by process {os.getpid()} on {socket.gethostname()}, whose heartbeat goes on.*stop that job or"
    with pytest.raises(ValueError, match=told):
        Lock(files)
    lock.check()
    lock.release()
    assert files.names() == []
    Lock(files).release()


def test_a_dead_process_is_noticed_at_once(files):
    lock = Lock(files)
    edit(files, pid=dead_pid(), uuid="other")
    with pytest.raises(ValueError, match="it was taken over"):
        lock.check()
    taken = Lock(files)
    taken.check()
    lock.release()  # is not its own any more
    taken.check()
    taken.release()


def test_a_process_elsewhere_may_have_any_number(files):
    lock = Lock(files, every=0.05)
    edit(files, pid=dead_pid(), space="another machine", host="n7")
    with pytest.raises(ValueError, match="on n7, whose"):
        Lock(files)
    lock.release()


def test_a_silent_job_is_taken_over(files):
    lock = Lock(files, every=60)
    time.sleep(0.05)
    taken = Lock(files, stale_s=0.04)
    taken.check()
    with pytest.raises(ValueError, match="it was taken over because this job was silent"):
        lock.check()
    lock.release()
    taken.release()


def test_a_beating_job_is_not(files):
    lock = Lock(files, every=0.02)
    time.sleep(0.3)
    with pytest.raises(ValueError, match="in use by"):
        Lock(files, stale_s=0.2)
    lock.release()


@pytest.mark.parametrize("clock", [1.0, 1e10])
def test_clocks_of_other_hosts_are_not_believed(files, clock, caplog, monkeypatch):
    """One that is years behind, or ahead: its lock stands while it changes, and is taken when it does not."""
    monkeypatch.setattr("core.dist_checkpointing.publish.lock.PATIENCE_S", 0.1)

    def beat(at):
        if isinstance(files, PosixCheckpointDir):
            os.utime(files.url + ".lock", (at, at))
        else:
            edit(files, time=at)

    lock = Lock(files, every=60)
    edit(files, space="another machine", host="n7")
    beat(clock)
    times = count(clock)
    told = pytest.raises(ValueError, match=r"is in use by process \d+ on n7, whose heartbeat goes on")
    with Heartbeat(lambda: beat(next(times)), every=0.05), told:
        Lock(files, stale_s=10)
    begin = time.monotonic()
    taken = Lock(files, stale_s=0.2)
    assert 0.2 <= time.monotonic() - begin < 4 and "on n7, which is silent; taken over if" in caplog.text
    taken.release()
    lock.release()


def test_a_beat_does_not_bring_a_lost_lock_back(files):
    lock = Lock(files, every=0.01)
    edit(files, uuid="other")
    lock._heartbeat._thread.join(5)
    assert not lock._heartbeat._thread.is_alive()
    files.remove(".lock")
    lock.release()
    assert files.names() == []


@pytest.mark.parametrize("text", [b"{", b"12345", b'{"owner": "apt"}'])
def test_a_lock_of_another_program_is_never_taken(files, text):
    files.write(".lock", text)
    with pytest.raises(ValueError, match=r"\.lock is no lock of a job that saves checkpoints; remove it if nobody"):
        Lock(files, stale_s=0)
    assert files.read(".lock") == text


def test_a_lock_that_is_a_link_to_nowhere(tmp_path):
    (tmp_path / ".lock").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"\.lock cannot be taken; remove it, or choose another directory"):
        Lock(CheckpointRoot(tmp_path).files)
    assert (tmp_path / ".lock").is_symlink()


@pytest.mark.parametrize("text", [b"", b'{"host":"n7","pi'])
def test_a_lock_that_was_killed_while_written(tmp_path, text):
    (tmp_path / ".lock").write_bytes(text)
    files = CheckpointRoot(tmp_path).files
    Lock(files, stale_s=0.1).release()
    assert not (tmp_path / ".lock").exists()


def test_of_many_that_take_over_one_succeeds(files):
    old = Lock(files, every=60)
    text = files.read(".lock")
    assert [files.swap(".lock", text, b"%d" % i) for i in range(3)] == [True, False, False]
    assert files.read(".lock") == b"0"
    assert not files.swap(".lock", None, b"new") and not files.swap("none", b"old", b"new")
    assert files.swap(".lock", b"0", None) and files.names() == []
    old.release()


def test_a_heartbeat_survives_hiccups():
    beats = []

    def beat():
        beats.append(len(beats))
        raise OSError("the network") if len(beats) < 3 else FileNotFoundError

    heart = Heartbeat(beat, every=0.001)
    heart._thread.join(5)
    assert beats == [0, 1, 2]
    heart.stop()


def test_a_released_lock_is_in_no_cycle(files):
    """The threads of its file system end with it, not when the collector happens to run."""
    gc.collect()
    gc.disable()
    try:
        lock = Lock(files)
        lock.release()
        kept = weakref.ref(lock)
        del lock
        assert kept() is None
    finally:
        gc.enable()
