"""A directory of checkpoints: what is committed, replaced, temporary or trash there, told apart by names alone.

`NAME` is a checkpoint. `.tmp-NAME-UUID` is being written, its `heartbeat` is touched by whoever writes.
`.replaced-NAME-UUID` was NAME until the attempt UUID took its place: it still is NAME while NAME is missing.
`.trash-…` is nothing: it is renamed before it is removed, so that nobody meets half of it.
"""

import contextlib
import errno
import os
from collections.abc import Iterable
from uuid import uuid4

from core.dist_checkpointing.json_files import unseal
from core.dist_checkpointing.place import PosixPlace

_HEARTBEAT = "heartbeat"


class Directory:
    """What `Root` needs of a POSIX file system."""

    def __init__(self, files: PosixPlace) -> None:
        self.files, self._fs = files, files.fs

    def prepare(self, folder: str = "") -> None:
        """Makes the directory, or one in it, durably: what is in it would go with it."""
        new = self._fs.makedirs(os.path.join(self.files.path, folder).rstrip("/"))
        self._fs.sync_all(os.path.dirname(path) for path in new)

    def names(self) -> list[str]:
        """Every committed checkpoint, sorted."""
        plain = {entry for entry in self._fs.listdir(self.files.path) if not entry.startswith(".")}
        return sorted(plain | {name for name, _, _ in self._marked("replaced")})

    def open(self, name: str) -> PosixPlace | None:
        """A committed checkpoint, None if there is none of that name."""
        for entry in (name, *self._replaced(name)):
            if self._fs.stat(self.files.url + entry) is not None:
                return self.files.below(entry)
        return None

    def identity(self, name: str) -> str:
        """The uuid of the checkpoint `name`, "damaged" if it cannot be told, "" if there is none."""
        place = self.open(name)
        if place is None:
            return ""
        try:
            return str(unseal(place.read("manifest.json"), "")["uuid"])
        except (OSError, ValueError, KeyError):
            return "damaged"

    def temporary(self, name: str, uuid: str) -> PosixPlace:
        """Where the attempt `uuid` writes."""
        return self.files.below(f".tmp-{name}-{uuid}")

    def create(self, name: str, uuid: str, note: bytes) -> None:
        """Makes the temporary, with its first heartbeat."""
        taken = self._fs.listdir(self.files.url + name)
        if taken and not {"manifest.json", "zarr.json", "receipts"} & set(taken):
            raise ValueError(
                f"{self.files.url}{name} holds {len(taken)} entries ({taken[0]}, …) and is no checkpoint: a save "
                "would replace it; choose a directory that is empty or does not exist"
            )
        if inside := [e for e in taken if self._fs.stat(f"{self.files.url}{name}/{e}/manifest.json") is not None]:
            raise ValueError(
                f"{self.files.url}{name} holds other checkpoints ({inside[0]}, ...), which a save there would "
                "remove; choose another name"
            )
        if self._fs.stat(self.files.url + "manifest.json") is not None:
            raise ValueError(f"{self.files.url} is a checkpoint itself; save beside it, not inside")
        self.prepare()
        place = self.temporary(name, uuid)
        self._fs.makedirs(place.url + "receipts")
        self._fs.write(place.url + _HEARTBEAT, note, exclusive=True)

    def abandon(self, name: str, uuid: str) -> None:
        """Removes the temporary."""
        self._discard([f".tmp-{name}-{uuid}"])

    def note(self, name: str, uuid: str) -> bytes:
        """What `create` was given."""
        return self.temporary(name, uuid).read(_HEARTBEAT)

    def beat(self, name: str, uuid: str) -> None:
        """Says that the temporary is being written."""
        self.temporary(name, uuid).touch(_HEARTBEAT)

    def ages(self) -> dict[tuple[str, str], float]:
        """The age of each temporary, by name and uuid."""
        return {(name, uuid): self.age(name, uuid) for name, uuid, _ in self._marked("tmp")}

    def age(self, name: str, uuid: str) -> float:
        """Seconds since the temporary was last known to be written; infinite: it is gone."""
        entry = f".tmp-{name}-{uuid}"
        return min(self.files.age(f"{entry}/{_HEARTBEAT}"), self.files.age(entry))

    def publish(self, name: str, uuid: str, replaces: str, manifest: bytes, files: Iterable[str]) -> bool:
        """Makes the temporary the checkpoint `name`. False: another one took the name meanwhile.

        What it needs is durable before the rename, and the rename before anything of the old checkpoint goes.
        """
        if self.identity(name) != replaces:
            return False
        place, final = self.temporary(name, uuid), self.files.url + name
        self._fs.write(place.url + "manifest.json", manifest)
        place.remove(_HEARTBEAT)
        self._fs.sync_all([place.url + "manifest.json", *(place.url + folder for folder in _folders(files))])
        if replaces and self._fs.stat(final) is not None:
            self._fs.rename(final, f"{self.files.url}.replaced-{name}-{uuid}")
        try:
            self._fs.rename(place.path, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        self._fs.sync(self.files.path)
        self._discard(self._replaced(name))
        return True

    def remove(self, name: str) -> None:
        """Removes a committed checkpoint, first from the listing, then its files."""
        self._discard([*self._replaced(name), name])

    def sweep(self, stale_s: float) -> list[str]:
        """Removes what no one will finish and returns its names; a replaced checkpoint without successor is back."""
        ages = self.ages()
        live = {key for key, age in ages.items() if age < stale_s}
        swept = [f".tmp-{name}-{uuid}" for name, uuid in ages.keys() - live]
        for name, uuid, entry in self._marked("replaced"):
            if (name, uuid) in live:
                continue
            if self._fs.stat(self.files.url + name) is None:
                self._fs.rename(self.files.url + entry, self.files.url + name)
            else:
                swept.append(entry)
        self._discard(swept)
        for entry in self._fs.listdir(self.files.path):
            if entry.startswith(".trash-"):
                self._fs.remove_tree(self.files.url + entry)
        return swept

    def _marked(self, mark: str) -> list[tuple[str, str, str]]:
        """(name, uuid, entry) of each entry `.mark-name-uuid`."""
        entries = [entry for entry in self._fs.listdir(self.files.path) if entry.startswith(f".{mark}-")]
        return [(*entry.removeprefix(f".{mark}-").rpartition("-")[::2], entry) for entry in entries]

    def _replaced(self, name: str) -> list[str]:
        return [entry for other, _, entry in self._marked("replaced") if other == name]

    def _discard(self, entries: Iterable[str]) -> None:
        """Trash durably first: after a power loss, too, a name stands for all of a checkpoint."""
        renamed = []
        for entry in entries:
            trash = f"{self.files.url}.trash-{entry}-{uuid4().hex}"
            with contextlib.suppress(FileNotFoundError):
                self._fs.rename(self.files.url + entry, trash)
                renamed.append(trash)
        if renamed:
            self._fs.sync(self.files.path)
        for trash in renamed:
            self._fs.remove_tree(trash)


def _folders(files: Iterable[str]) -> list[str]:
    """Every directory in which, or below which, one of the files lies."""
    folders = {""}
    for file in files:
        while file := os.path.dirname(file):
            folders.add(file)
    return sorted(folders)
