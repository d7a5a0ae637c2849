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
TRIES = 100  # while other jobs take it and give it back
POLL_S = 0.1
PATIENCE_S = 3.0  # of a start that waits for a heartbeat, before it says so
SILENT_S = 5.0  # some beats, and what an NFS client may not see of them: then an orphan is the last one


class Heartbeat:
    """Calls `beat` every `every` seconds until it is stopped, or until what it touches is gone. A context."""

    def __init__(self, beat: Callable[[], None], every: float = 1.0) -> None:
        self._beat, self._every, self._stop = beat, every, threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._beat()
            except FileNotFoundError:
                return
            except (OSError, ValueError):  # a hiccup of the file system or of the network: the next may do
                continue

    def stop(self) -> None:
        """Returns when no beat runs any more."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Orphaned(RuntimeError):
    """The job of this process is gone, and no other rank's process goes on with what is waited for."""


class Others:
    """Watches for the beats of other ranks: to be called again and again while one waits for them.

    orphaned: whether the job of this process is gone: it must not beat itself then. last_beat: what a beat changes.
    """

    def __init__(
        self, orphaned: Callable[[], bool], last_beat: Callable[[], str], silent_s: float = SILENT_S
    ) -> None:
        self._orphaned, self._last_beat, self._silent_s = orphaned, last_beat, silent_s
        self._seen: str | None = None
        self._since = 0.0

    def __call__(self) -> None:
        """Raises Orphaned: nobody beats, and the job is gone."""
        if not self._orphaned():
            return
        beat = self._last_beat()
        if beat != self._seen:
            self._seen, self._since = beat, time.monotonic()
        elif time.monotonic() - self._since > self._silent_s:
            raise Orphaned(f"the job is gone, and no other rank was heard of for {self._silent_s:.0f} s")


class Lock:
    """The right to write into one directory of checkpoints, until `release` or the end of this process.

    ValueError: another job has it. A job is known to be gone when its process is dead on this machine, or when it
    did not touch its lock while this one watched for `stale_s`; then its lock is taken over.
    """

    def __init__(self, place: CheckpointDir, *, stale_s: float = 60.0, every: float = 1.0) -> None:
        self._place, self._uuid = place, uuid4().hex
        me = {"host": socket.gethostname(), "pid": os.getpid(), "space": _process_space(), "time": time.time()}
        mine = canonical_json(me | {"uuid": self._uuid})
        found: bytes | None = None
        for _ in range(TRIES):
            if place.swap(_LOCK, found, mine):
                break
            found = self._left_behind(stale_s)
        else:  # a link that leads nowhere can be neither read nor made
            raise ValueError(f"{place.url}{_LOCK} cannot be taken; remove it, or choose another directory")
        self._heart = Heartbeat(self._beat, every)

    def check(self) -> None:
        """Raises ValueError if another job has taken over: this one was silent for too long."""
        found = _read(self._place)
        if found is None:
            raise ValueError(f"the lock {self._place.url}{_LOCK} is gone: was the directory removed? start again")
        if _owner(found).get("uuid") != self._uuid:
            raise ValueError(
                f"the lock {self._place.url}{_LOCK} now is that of {_told(_owner(found))}: it was taken over "
                "because this job was silent for too long; stop one of the two"
            )

    def release(self) -> None:
        """Gives the lock back, if it still is this one's."""
        self._heart.stop()
        found = _read(self._place)
        if found is not None and _owner(found).get("uuid") == self._uuid:
            self._place.swap(_LOCK, found, None)

    def _beat(self) -> None:
        found = _read(self._place)
        if found is None or _owner(found).get("uuid") != self._uuid:
            raise FileNotFoundError(_LOCK)
        self._place.touch(_LOCK)

    def _left_behind(self, stale_s: float) -> bytes | None:
        """The lock of a job that is gone; None: there is none any more. ValueError: its job lives."""
        found = _read(self._place)
        if found is None:
            return None
        if not is_lock(found):
            raise ValueError(
                f"{self._place.url}{_LOCK} is no lock of a job that saves checkpoints; remove it if nobody needs it, "
                "or choose another directory"
            )
        owner = _owner(found)
        alive = _is_alive(owner)
        here = alive and self._place.age(_LOCK) < stale_s  # by one clock
        if alive is not False and (here or self._is_touched(found, owner, stale_s)):
            raise ValueError(
                f"{self._place.url} is in use by {_told(owner)}, whose heartbeat goes on; two jobs must not save "
                "into one directory: stop that job or choose another directory"
            )
        return found

    def _is_touched(self, lock: bytes, owner: dict[str, Any], stale_s: float) -> bool:
        """Watches a lock for `stale_s` by the clock of this process: other hosts' are not believed."""
        before, end, told = self._place.last_touch(_LOCK), time.monotonic() + stale_s, False
        while _read(self._place) == lock and self._place.last_touch(_LOCK) == before:
            if time.monotonic() >= end:
                return False
            if not told and time.monotonic() > end - stale_s + PATIENCE_S:
                text = "%s%s belongs to %s, which is silent; taken over if it is for %.0f s"
                log.warning(text, self._place.url, _LOCK, _told(owner), stale_s)
                told = True
            time.sleep(min(POLL_S, stale_s))
        return _read(self._place) is not None


def _read(place: CheckpointDir) -> bytes | None:
    try:
        return place.read(_LOCK)
    except FileNotFoundError:
        return None


def _owner(lock: bytes) -> dict[str, Any]:
    """What a lock says; nothing if it was killed while it was written."""
    try:
        value = parse_json(lock, _LOCK)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _told(owner: dict[str, Any]) -> str:
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
    space, pid = owner.get("space"), owner.get("pid")
    if not space or space != _process_space() or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True
