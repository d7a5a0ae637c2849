"""What a key-value store of checkpoints holds, in a few objects: a store can only list every object it has.

`.index/NAME/taken` says that NAME may be a checkpoint: it is there before the pointer and goes after it, so the index
never hides one; whether it is one, the pointer says. Its content is the uuid of the last attempt.
`.index/NAME/UUID.heartbeat` is there while an attempt is being written, `UUID.trash` beside it while one is removed.
`.index.json` says that no checkpoint is without its entry. Where it is not there (a store that versions without an
index wrote) every object is listed, until a sweep has made the entries. Those versions' marks lie in `NAME/`.
"""

import re
import time
from collections.abc import Iterable

from core.dist_checkpointing.format.json_files import seal, unseal
from core.dist_checkpointing.storage.kv_checkpoint_dir import KvCheckpointDir

_COMPLETE = ".index.json"
_TAKEN = re.compile(r"\.index/([^./][^/]*)/taken")
# all else is not ours
_MARK = re.compile(r"(?:\.index/)?([^./][^/]*)/([0-9a-f]{32})\.(heartbeat|trash)")
_POINTER = "/manifest.json"


def heartbeat(name: str, uuid: str) -> str:
    """The object that says that an attempt is being written."""
    return f".index/{name}/{uuid}.heartbeat"


def trash(name: str, uuid: str) -> str:
    """The object that says that what lies below a uuid is being removed."""
    return f".index/{name}/{uuid}.trash"


def marks(name: str, uuid: str, kind: str) -> list[str]:
    """Where a heartbeat or trash may be: in the index, and where older versions put it."""
    return [f".index/{name}/{uuid}.{kind}", f"{name}/{uuid}.{kind}"]


class Index:
    """See above. `thorough` in a method: list every object, whatever the index says."""

    def __init__(self, files: KvCheckpointDir) -> None:
        self._files = files
        self._complete = False

    def names(self, *, thorough: bool = False) -> list[str]:
        """Every committed checkpoint, sorted: one request for 1000 entries, and one for each."""
        if thorough or not self._is_complete():
            return _names_with_pointer(self._files.names())
        # an entry alone proves nothing: an attempt that was never committed has one, too
        pointers = self._files.present(name + _POINTER for name in self._taken())
        return sorted(pointer.removesuffix(_POINTER) for pointer in pointers)

    def marks(self, name: str = "", *, thorough: bool = False) -> dict[tuple[str, str], list[str]]:
        """The heartbeats and trash marks (of one name), by name and uuid."""
        lists_all = not name and (thorough or not self._is_complete())
        keys_by_attempt: dict[tuple[str, str], list[str]] = {}
        for key in self._files.names("" if lists_all else f".index/{name}"):
            if match := _MARK.fullmatch(key):
                keys_by_attempt.setdefault((match[1], match[2]), []).append(key)
        return keys_by_attempt

    def take(self, name: str, uuid: str) -> None:
        """An attempt at `name` has begun: to be called behind its heartbeat."""
        self._files.write(f".index/{name}/taken", uuid.encode())

    def release(self, name: str) -> None:
        """Removes the entry of a name where nothing is left.

        A job that takes the name just now has its heartbeat there, or changes the entry: then it stays.
        """
        key = f".index/{name}/taken"
        try:
            before = self._files.read(key)
        except FileNotFoundError:
            return
        if not self.marks(name) and self._files.size(name + _POINTER) is None:
            self._files.swap(key, before, None)

    def tidy(self, *, thorough: bool = False) -> None:
        """Makes the entries that are missing, if they were not made already, and removes those of no checkpoint."""
        committed = set(self.names(thorough=thorough))
        taken = set(self._taken())
        for name in taken - committed:
            self.release(name)
        # checkpoints of versions without an index; a job that takes the name meanwhile writes the entry itself
        for name in committed - taken:
            self._files.swap(f".index/{name}/taken", None, b"")
        if not self._is_complete():
            self._files.swap(_COMPLETE, None, seal({"format": 1}))

    def _taken(self) -> list[str]:
        matches = map(_TAKEN.fullmatch, self._files.names(".index"))
        return [match[1] for match in matches if match]

    def _is_complete(self) -> bool:
        if not self._complete:
            try:
                self._complete = unseal(self._files.read(_COMPLETE), _COMPLETE).get("format") == 1
            except (FileNotFoundError, ValueError):
                # a user's file of that name is left as it is
                self._complete = False
        return self._complete


def _names_with_pointer(keys: Iterable[str]) -> list[str]:
    """The checkpoints among all objects of a store: NAME of each `NAME/manifest.json`."""
    names = []
    for key in keys:
        name, _, rest = key.partition("/")
        if rest == "manifest.json":
            names.append(name)
    return names


class Watch:
    """How long an object did not change, by the clock of this process: those of other hosts may be hours off."""

    def __init__(self) -> None:
        # url -> content, and when it was first read
        self._contents: dict[str, tuple[bytes, float]] = {}

    def unchanged(self, url: str, content: bytes) -> float:
        """Seconds since this content was first read; 0 for what is new."""
        now = time.monotonic()
        previous, since = self._contents.get(url, (None, now))
        if previous != content:  # the owner has beaten
            since = now
        self._contents[url] = content, since
        return now - since

    def forget(self, url: str) -> None:
        """A checkpoint is removed: what was watched of it counts no more."""
        self._contents.pop(url, None)


# of the process: each save, and each look of a manager, has a CheckpointRoot of its own
WATCH = Watch()
