"""A key-value store of checkpoints, without renames: the files of an attempt lie in `NAME/UUID/` for ever.

`NAME/manifest.json` is a pointer, {"crc": …, "format": 1, "uuid": …}, put on the condition that it is what it was
when the attempt began: whoever puts it has committed. Nobody looks below a uuid that no pointer names.
What is being written or removed has a mark in the index (`index.py`): below a uuid without one nothing is removed, it
may be a user's.
"""

import json
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping

from core.dist_checkpointing.format.json_files import seal, unseal
from core.dist_checkpointing.publish.index import WATCH, Index, heartbeat, marks, trash
from core.dist_checkpointing.storage.kv_checkpoint_dir import KvCheckpointDir

log = logging.getLogger(__name__)

_POINTER = "/manifest.json"
# of the JSON in a heartbeat
_NOTE_KEYS = {"pid", "replaces", "time"}
_TRASH = b"removed by paracore"
_COMMITTED = re.compile(r"([0-9a-f]{32})/manifest\.json")


class PointerCommit:
    """How `CheckpointRoot` commits, finds and removes checkpoints in a key-value store."""

    def __init__(self, files: KvCheckpointDir) -> None:
        self.files = files
        self._index = Index(files)

    def prepare(self, folder: str = "") -> None:
        """Does nothing: there are no directories."""

    def names(self) -> list[str]:
        """Every committed checkpoint, sorted."""
        return self._index.names()

    def open(self, name: str) -> KvCheckpointDir | None:
        """A committed checkpoint, None if there is none of that name. ValueError: its pointer is damaged."""
        uuid = self._uuid(name)
        if uuid:
            return self.temporary(name, uuid)
        return None

    def identity(self, name: str) -> str:
        """The uuid of the checkpoint `name`, "damaged" if its pointer is, "" if there is none."""
        try:
            return self._uuid(name)
        except ValueError:
            return "damaged"

    def temporary(self, name: str, uuid: str) -> KvCheckpointDir:
        """Where the attempt `uuid` writes, and stays."""
        return self.files.below(f"{name}/{uuid}")

    def foreign_files(self, name: str) -> list[str]:
        """Always empty: what is removed lies below uuids of ours."""
        return []

    def create(self, name: str, uuid: str, note: bytes) -> None:
        """Announces the attempt. ValueError: its pointer would replace an object that is not ours."""
        if self.identity(name) == "damaged" and not any(
            map(_COMMITTED.fullmatch, self.files.below(name).names())
        ):
            raise ValueError(
                f"{self.files.url}{name}{_POINTER} is there and belongs to no checkpoint: a save would replace it; "
                "choose another name"
            )
        self.files.write(heartbeat(name, uuid), note)
        self._index.take(name, uuid)

    def abandon(self, name: str, uuid: str) -> None:
        """Remove what an attempt wrote: it will not be committed."""
        self._mark_as_trash(name, uuid)
        self.files.remove(heartbeat(name, uuid))
        self._remove_all(name, uuid)
        self._index.release(name)

    def note(self, name: str, uuid: str) -> bytes:
        """The `note` that `create` was given."""
        return self.files.read(heartbeat(name, uuid))

    def beat(self, name: str, uuid: str) -> None:
        """A heartbeat: the attempt is being written."""
        self.files.touch(heartbeat(name, uuid))

    def last_beat(self, name: str, uuid: str) -> str:
        """A text that every beat changes."""
        return self.files.last_touch(heartbeat(name, uuid))

    def ages(self, name: str = "", *, thorough: bool = False) -> dict[tuple[str, str], float]:
        """By name and uuid, of each attempt (at `name`) that no pointer names: seconds without a beat.

        As long as this process has watched; infinite: it is being removed. `thorough`: also of those that are not in
        the index.
        """
        return self._silent_seconds(self._index.marks(name, thorough=thorough))

    def _silent_seconds(
        self, attempts: Mapping[tuple[str, str], Iterable[str]]
    ) -> dict[tuple[str, str], float]:
        """As `ages`, of the attempts that have marks at these keys."""
        seconds: dict[tuple[str, str], float] = {}
        for attempt, keys in attempts.items():
            contents = {}
            for key in keys:
                content = self._read_mark(key)
                if content is not None:
                    contents[key] = content
            if contents:
                beats = [key for key in contents if key.endswith(".heartbeat")]
                seconds[attempt] = min(
                    (WATCH.unchanged(self.files.url + key, contents[key]) for key in beats),
                    default=math.inf,
                )
        # only now: what lost its heartbeat to a commit meanwhile has its pointer
        identities = {name: self.identity(name) for name, _ in seconds}
        uncommitted = [
            (name, uuid) for name, uuid in seconds if identities[name] not in (uuid, "damaged")
        ]
        return {attempt: seconds[attempt] for attempt in uncommitted}

    def watch(self, stale_s: float, poll_s: float = 1.0) -> None:
        """Returns when of each attempt, also of those that are not in the index, it is known whether it beats."""
        attempts = self._index.marks(thorough=True)
        self._silent_seconds(attempts)
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < stale_s:
            # younger than this watch: it has beaten since
            if all(
                age < passed or age == math.inf for age in self._silent_seconds(attempts).values()
            ):
                return
            time.sleep(min(poll_s, stale_s))

    def exists(self, name: str, uuid: str) -> bool:
        """Whether the attempt has begun, and is neither committed nor given up."""
        return self.files.size(heartbeat(name, uuid)) is not None

    def publish(
        self, name: str, uuid: str, replaces: str, manifest: bytes, files: Iterable[str]
    ) -> bool:
        """Makes the attempt the checkpoint `name`. False: another one took the name meanwhile.

        The second beat is for a sweep: it removes the heartbeat it judged, so it fails from here on, or this does.
        """
        # 1. the manifest, below the uuid
        self.beat(name, uuid)
        self.temporary(name, uuid).write("manifest.json", manifest)
        self.beat(name, uuid)
        try:
            old_pointer = self.files.read(name + _POINTER)
        except FileNotFoundError:
            old_pointer = None
        # 2. the index names the checkpoint before there is one
        self._index.take(name, uuid)  # again: S3 deletes without a condition, so it may be gone
        pointer = seal({"format": 1, "uuid": uuid})
        # as long as the pointer names it nobody removes what has this mark
        if replaces:
            self._mark_as_trash(name, replaces)
        # 3. the commit: a conditional put, which of several attempts one does
        if self.identity(name) != replaces or not self.files.swap(
            name + _POINTER, old_pointer, pointer
        ):
            return False
        # 4. what is left of the attempt, and what it replaced
        try:
            self.files.remove(heartbeat(name, uuid))
            if replaces:
                self._remove_all(name, replaces)
        except (OSError, ValueError, RuntimeError) as error:
            # it is committed
            log.warning(
                "%s%s: what it replaced is left to be removed later: %s",
                self.files.url,
                name,
                error,
            )
        return True

    def remove(self, name: str) -> None:
        """Removes a committed checkpoint, its pointer first."""
        uuid = self.identity(name)
        self._mark_as_trash(name, uuid)
        self.files.remove(name + _POINTER)
        self._remove_all(name, uuid)
        self._index.release(name)

    def sweep(self, stale_s: float, name: str = "", *, thorough: bool = False) -> list[str]:
        """Removes what no one will finish (of `name`, or of all) and returns its prefixes."""
        swept = []
        for stale_name, uuid in self._stale(stale_s, name, thorough):
            self._mark_as_trash(stale_name, uuid)
            if self._end_attempt(stale_name, uuid, stale_s):
                self._remove_all(stale_name, uuid)
                self._index.release(stale_name)
                swept.append(f"{stale_name}/{uuid}")
            else:  # its writer lives
                self.files.remove(trash(stale_name, uuid))
        if not name:
            self._index.tidy(thorough=thorough)
        return swept

    def leftovers(self, stale_s: float, *, thorough: bool = False) -> list[str]:
        """What `sweep` would remove."""
        return [f"{name}/{uuid}" for name, uuid in self._stale(stale_s, "", thorough)]

    def _stale(self, stale_s: float, name: str, thorough: bool) -> list[tuple[str, str]]:
        return [
            attempt for attempt, age in self.ages(name, thorough=thorough).items() if age >= stale_s
        ]

    def _end_attempt(self, name: str, uuid: str, stale_s: float) -> bool:
        """Removes the heartbeat of an attempt, if it still is the one that was judged. False: it beats after all."""
        for key in marks(name, uuid, "heartbeat"):
            note = self._read_mark(key)
            if note is None:
                continue
            if WATCH.unchanged(self.files.url + key, note) < stale_s or not self.files.swap(
                key, note, None
            ):
                return False
        return True

    def _read_mark(self, key: str) -> bytes | None:
        """The content of a heartbeat, or of a trash mark; None: there is none, or not one of ours."""
        try:
            data = self.files.read(key)
            is_ours = data == _TRASH or (
                key.endswith(".heartbeat") and json.loads(data).keys() >= _NOTE_KEYS
            )
        except (FileNotFoundError, ValueError, AttributeError):
            return None
        if is_ours:
            return data
        return None

    def _mark_as_trash(self, name: str, uuid: str) -> None:
        if uuid not in ("", "damaged"):
            self.files.write(trash(name, uuid), _TRASH)

    def _remove_all(self, name: str, uuid: str) -> None:
        """What lies below a uuid, then its mark: after an interrupt the mark still says that it is to be removed."""
        if uuid in ("", "damaged"):
            return
        self.temporary(name, uuid).remove_all()
        # of one that was killed right behind its commit
        self.files.remove(heartbeat(name, uuid))
        WATCH.forget(self.files.url + heartbeat(name, uuid))
        for key in marks(name, uuid, "trash"):
            if key == trash(name, uuid) or self._read_mark(key) is not None:
                self.files.remove(key)

    def _uuid(self, name: str) -> str:
        """The uuid that a pointer names; "" without a pointer. ValueError: it is damaged."""
        try:
            data = self.files.read(name + _POINTER)
        except FileNotFoundError:
            return ""
        return str(unseal(data, self.files.url + name + _POINTER).get("uuid"))
