"""A key-value store of checkpoints, without renames: the files of an attempt lie in `NAME/UUID/` for ever.

`NAME/manifest.json` is a pointer, {"crc": …, "format": 1, "uuid": …}, put on the condition that it is what it was
when the attempt began: whoever puts it has committed. Nobody looks below a uuid that no pointer names.
`NAME/UUID.heartbeat` is there while an attempt is being written, `NAME/UUID.trash` while it is being removed: below a
uuid that has neither nothing is removed, it may be a user's.
"""

import json
import logging
import re
from collections.abc import Iterable

from core.dist_checkpointing.json_files import seal, unseal
from core.dist_checkpointing.kv_place import KvPlace

log = logging.getLogger(__name__)

_POINTER = "/manifest.json"
_ATTEMPT = re.compile(r"([^/]+)/([0-9a-f]{32})\.(heartbeat|trash)")  # all else is not ours
_NOTE = {"pid", "replaces", "time"}  # what a heartbeat tells
_TRASH = b"removed by paracore"
_COMMITTED = re.compile(r"([0-9a-f]{32})/manifest\.json")


class Bucket:
    """What `Root` needs of a key-value store."""

    def __init__(self, files: KvPlace) -> None:
        self.files = files

    def prepare(self, folder: str = "") -> None:
        """Nothing: there are no directories."""

    def names(self) -> list[str]:
        """Every committed checkpoint, sorted."""
        return _pointers(self.files.names())

    def open(self, name: str) -> KvPlace | None:
        """A committed checkpoint, None if there is none of that name. ValueError: its pointer is damaged."""
        uuid = self._uuid(name)
        return self.temporary(name, uuid) if uuid else None

    def identity(self, name: str) -> str:
        """The uuid of the checkpoint `name`, "damaged" if it cannot be told, "" if there is none."""
        try:
            return self._uuid(name)
        except ValueError:
            return "damaged"

    def temporary(self, name: str, uuid: str) -> KvPlace:
        """Where the attempt `uuid` writes, and stays."""
        return self.files.below(f"{name}/{uuid}")

    def strangers(self, name: str) -> list[str]:
        """None: what is removed lies below uuids of ours."""
        return []

    def create(self, name: str, uuid: str, note: bytes) -> None:
        """Announces the attempt. ValueError: its pointer would replace an object that is not ours."""
        if self.identity(name) == "damaged" and not any(map(_COMMITTED.fullmatch, self.files.below(name).names())):
            raise ValueError(
                f"{self.files.url}{name}{_POINTER} is there and belongs to no checkpoint: a save would replace it; "
                "choose another name"
            )
        self.files.write(_heartbeat(name, uuid), note)

    def abandon(self, name: str, uuid: str) -> None:
        """Removes the attempt."""
        self._mark(name, uuid)
        self.files.remove(_heartbeat(name, uuid))
        self._remove_all(name, uuid)

    def note(self, name: str, uuid: str) -> bytes:
        """What `create` was given."""
        return self.files.read(_heartbeat(name, uuid))

    def beat(self, name: str, uuid: str) -> None:
        """Says that the attempt is being written."""
        self.files.touch(_heartbeat(name, uuid))

    def ages(self, name: str = "") -> dict[tuple[str, str], float]:
        """The age of each attempt (at `name`) that no pointer names, by name and uuid."""
        attempts = [found for key in self.files.names(name) if (found := _ATTEMPT.fullmatch(key))]
        ages = {(of[1], of[2]): self.age(of[1], of[2]) for of in attempts if self._is_mark(of[0])}
        # only now: what lost its heartbeat to a commit meanwhile has its pointer
        pointed = {of: self.identity(of) for of, _ in ages}
        return {(of, uuid): age for (of, uuid), age in ages.items() if pointed[of] not in (uuid, "damaged")}

    def exists(self, name: str, uuid: str) -> bool:
        """Whether the attempt is there, and not committed."""
        return self.files.size(_heartbeat(name, uuid)) is not None

    def age(self, name: str, uuid: str) -> float:
        """Seconds since the attempt was last known to be written; infinite: it is committed, or gone."""
        return self.files.age(_heartbeat(name, uuid))

    def publish(self, name: str, uuid: str, replaces: str, manifest: bytes, files: Iterable[str]) -> bool:
        """Makes the attempt the checkpoint `name`. False: another one took the name meanwhile.

        The second beat is for a sweep: it removes the heartbeat it judged, so it fails from here on, or this does.
        """
        self.beat(name, uuid)
        self.temporary(name, uuid).write("manifest.json", manifest)
        self.beat(name, uuid)
        try:
            old = self.files.read(name + _POINTER)
        except FileNotFoundError:
            old = None
        pointer = seal({"format": 1, "uuid": uuid})
        if replaces:  # while the pointer names it nobody minds the mark
            self._mark(name, replaces)
        if self.identity(name) != replaces or not self.files.swap(name + _POINTER, old, pointer):
            return False
        try:
            self.files.remove(_heartbeat(name, uuid))
            if replaces:
                self._remove_all(name, replaces)
        except (OSError, ValueError, RuntimeError) as error:  # it is committed
            log.warning("%s%s: what it replaced is left to be removed later: %s", self.files.url, name, error)
        return True

    def remove(self, name: str) -> None:
        """Removes a committed checkpoint, its pointer first."""
        uuid = self.identity(name)
        self._mark(name, uuid)
        self.files.remove(name + _POINTER)
        self._remove_all(name, uuid)

    def sweep(self, stale_s: float, name: str = "") -> list[str]:
        """Removes what no one will finish (of `name`, or of all) and returns its prefixes."""
        swept = []
        for of, uuid in self._stale(stale_s, name):
            try:
                note = self.note(of, uuid)
            except FileNotFoundError:
                note = None
            self._mark(of, uuid)
            if note is None or self.files.swap(_heartbeat(of, uuid), note, None):
                self._remove_all(of, uuid)
                swept.append(f"{of}/{uuid}")
            else:  # its writer lives
                self.files.remove(_trash(of, uuid))
        return swept

    def leftovers(self, stale_s: float) -> list[str]:
        """What `sweep` would remove."""
        return [f"{name}/{uuid}" for name, uuid in self._stale(stale_s)]

    def _stale(self, stale_s: float, name: str = "") -> list[tuple[str, str]]:
        return [key for key, age in self.ages(name).items() if age >= stale_s]

    def _is_mark(self, key: str) -> bool:
        """Whether a heartbeat, or what tells trash, is ours."""
        try:
            data = self.files.read(key)
            return data == _TRASH or (key.endswith(".heartbeat") and json.loads(data).keys() >= _NOTE)
        except (FileNotFoundError, ValueError, AttributeError):
            return False

    def _mark(self, name: str, uuid: str) -> None:
        if uuid not in ("", "damaged"):
            self.files.write(_trash(name, uuid), _TRASH)

    def _remove_all(self, name: str, uuid: str) -> None:
        """What lies below a uuid, then its mark."""
        if uuid not in ("", "damaged"):
            self.temporary(name, uuid).remove_all()
            self.files.remove(_trash(name, uuid))

    def _uuid(self, name: str) -> str:
        try:
            data = self.files.read(name + _POINTER)
        except FileNotFoundError:
            return ""
        return str(unseal(data, self.files.url + name + _POINTER).get("uuid"))


def _heartbeat(name: str, uuid: str) -> str:
    return f"{name}/{uuid}.heartbeat"


def _trash(name: str, uuid: str) -> str:
    return f"{name}/{uuid}.trash"


def _pointers(keys: Iterable[str]) -> list[str]:
    """The checkpoints that have one."""
    return [name for name, _, rest in (key.partition("/") for key in keys) if rest == "manifest.json"]
