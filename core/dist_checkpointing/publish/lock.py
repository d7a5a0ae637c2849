"""Signs of life: a thread that beats, and a lock that dies with its owner."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any
from uuid import uuid4

from core.dist_checkpointing.format.json_files import canonical_json, parse_json
from core.dist_checkpointing.publish.ownership import is_lock
from core.dist_checkpointing.storage.checkpoint_dir import CheckpointDir

log = logging.getLogger(__name__)

_LOCK = ".lock"
MAX_TRIES = 100  # while other jobs take it and give it back
POLL_S = 0.1
# of a start that waits for a heartbeat, before it logs that it waits
PATIENCE_S = 3.0
# some beats, and what an NFS client may not see of them: then an orphan is the last one
SILENT_S = 5.0


class Heartbeat:
    """Calls `beat` every `every` seconds until it is stopped, or until what it touches is gone. A context."""

    def __init__(self, beat: Callable[[], None], every: float = 1.0) -> None:
        self._beat = beat
        self._interval_s = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._beat()
            except FileNotFoundError:
                return
            except (OSError, ValueError):
                # a hiccup of the file system or of the network: the next may do
                continue

    def stop(self) -> None:
        """Returns when no beat runs any more."""
        self._stop.set()
        self._thread.join()
        # its owner, a lock, keeps this: no cycle, so that the threads of its file system end with it
        self._beat = _nothing

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _nothing() -> None:
    """No beat any more."""


class Orphaned(RuntimeError):
    """The job of this process is gone, and no other rank's process goes on with what is waited for."""


class OtherRanks:
    """Watches for the beats of other ranks: to be called again and again while one waits for them.

    orphaned: whether the job of this process is gone: it must not beat itself then. last_beat: a text that every beat
    changes.
    """

    def __init__(
        self, orphaned: Callable[[], bool], last_beat: Callable[[], str], silent_s: float = SILENT_S
    ) -> None:
        self._orphaned = orphaned
        self._last_beat = last_beat
        self._silent_s = silent_s
        self._latest_beat: str | None = None
        # when that beat was first noticed, by this process's clock
        self._latest_time = 0.0

    def __call__(self) -> None:
        """Raises Orphaned: nobody beats, and the job is gone."""
        if not self._orphaned():
            return
        beat = self._last_beat()
        if beat != self._latest_beat:
            self._latest_beat = beat
            self._latest_time = time.monotonic()
        elif time.monotonic() - self._latest_time > self._silent_s:
            raise Orphaned(
                f"the job is gone, and no other rank was heard of for {self._silent_s:.0f} s"
            )


class Lock:
    """The right to write into one directory of checkpoints, until `release` or the end of this process.

    ValueError: another job has it. A job is known to be gone when its process is dead on this machine, or when it
    did not touch its lock while this one watched for `stale_s`; then its lock is taken over.
    """

    def __init__(
        self, directory: CheckpointDir, *, stale_s: float = 60.0, every: float = 1.0
    ) -> None:
        self._directory = directory
        self._uuid = uuid4().hex
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "space": _process_space(),
            "time": time.time(),
        }
        content = canonical_json(owner | {"uuid": self._uuid})
        # compare and swap: the lock is taken only if it still is what was judged to be abandoned
        abandoned: bytes | None = None
        for _ in range(MAX_TRIES):
            if directory.swap(_LOCK, abandoned, content):
                break
            abandoned = self._abandoned_lock(stale_s)
        else:
            # a link that leads nowhere can be neither read nor made
            raise ValueError(
                f"{directory.url}{_LOCK} cannot be taken; remove it, or choose another directory"
            )
        self._heartbeat = Heartbeat(self._beat, every)

    def check(self) -> None:
        """Raises ValueError if another job has taken over: this one was silent for too long."""
        content = _read(self._directory)
        if content is None:
            raise ValueError(
                f"the lock {self._directory.url}{_LOCK} is gone: was the directory removed? start again"
            )
        if not self._is_own(content):
            raise ValueError(
                f"the lock {self._directory.url}{_LOCK} now is that of {_owner_text(_owner_of(content))}: it was "
                "taken over because this job was silent for too long; stop one of the two"
            )

    def release(self) -> None:
        """Gives the lock back, if it still is this one's."""
        self._heartbeat.stop()
        content = _read(self._directory)
        if content is not None and self._is_own(content):
            self._directory.swap(_LOCK, content, None)

    def _is_own(self, content: bytes) -> bool:
        return _owner_of(content).get("uuid") == self._uuid

    def _beat(self) -> None:
        # taken over, or removed: this ends the heartbeat, which would else keep another job's lock alive
        content = _read(self._directory)
        if content is None or not self._is_own(content):
            raise FileNotFoundError(_LOCK)
        self._directory.touch(_LOCK)

    def _abandoned_lock(self, stale_s: float) -> bytes | None:
        """The lock of a job that is gone; None: there is none any more. ValueError: its job lives."""
        content = _read(self._directory)
        if content is None:
            return None
        if not is_lock(content):
            raise ValueError(
                f"{self._directory.url}{_LOCK} is no lock of a job that saves checkpoints; remove it if nobody needs "
                "it, or choose another directory"
            )
        owner = _owner_of(content)
        process_lives = _is_alive(owner)
        if process_lives is False:
            return content
        # of a process of this machine the age is by one clock; else only a touch while this one watches counts
        lives_here = process_lives and self._directory.age(_LOCK) < stale_s
        if lives_here or self._is_touched(content, owner, stale_s):
            raise ValueError(
                f"{self._directory.url} is in use by {_owner_text(owner)}, whose heartbeat goes on; two jobs must "
                "not save into one directory: stop that job or choose another directory"
            )
        return content

    def _is_touched(self, lock: bytes, owner: dict[str, Any], stale_s: float) -> bool:
        """Watches a lock for `stale_s` by the clock of this process: other hosts' are not believed."""
        first_touch = self._directory.last_touch(_LOCK)
        end = time.monotonic() + stale_s
        logged = False
        while _read(self._directory) == lock and self._directory.last_touch(_LOCK) == first_touch:
            if time.monotonic() >= end:
                return False
            if not logged and time.monotonic() > end - stale_s + PATIENCE_S:
                text = "%s%s belongs to %s, which is silent; taken over if it is for %.0f s"
                log.warning(text, self._directory.url, _LOCK, _owner_text(owner), stale_s)
                logged = True
            time.sleep(min(POLL_S, stale_s))
        return _read(self._directory) is not None


def _read(directory: CheckpointDir) -> bytes | None:
    try:
        return directory.read(_LOCK)
    except FileNotFoundError:
        return None


def _owner_of(lock: bytes) -> dict[str, Any]:
    """The owner that a lock names; nothing if it was killed while it wrote the lock."""
    try:
        value = parse_json(lock, _LOCK)
    except ValueError:
        return {}
    if isinstance(value, dict):
        return value
    return {}


def _owner_text(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def _process_space() -> str:
    """Which machine and container a pid belongs to: hosts may share a name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether a process of this machine is; None: it is one of another machine, or not known."""
    space = owner.get("space")
    pid = owner.get("pid")
    if not space or space != _process_space() or not isinstance(pid, int):
        return None
    try:
        # sends nothing, but fails if there is no such process
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True
