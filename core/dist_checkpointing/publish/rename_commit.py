"""A directory of checkpoints: what is committed, replaced, temporary or trash there is known by names alone.

`NAME` is a checkpoint. `.tmp-NAME-UUID` is being written, its `UUID.heartbeat` is touched by whoever writes.
`.replaced-NAME-UUID` was NAME until the attempt UUID took its place: it still is NAME while NAME is missing.
`.trash-UUID` is nothing: it is renamed before it is removed, so that nobody meets half of it.
What has such a name and is not proven ours (`ownership`) is a user's, and stays.
"""

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterable
from uuid import uuid4

from core.dist_checkpointing.format.json_files import unseal
from core.dist_checkpointing.publish.manifest import MANIFEST
from core.dist_checkpointing.publish.ownership import (
    foreign_files,
    is_lock,
    is_remains,
    listed_files,
)
from core.dist_checkpointing.storage.checkpoint_dir import PosixCheckpointDir

log = logging.getLogger(__name__)

_MARKED = re.compile(r"\.(tmp|replaced)-(.+)-([0-9a-f]{32})", re.DOTALL)
_TRASH = re.compile(r"\.trash-([0-9a-f]{32})")


class RenameCommit:
    """How `CheckpointRoot` commits, finds and removes checkpoints in a POSIX file system."""

    def __init__(self, files: PosixCheckpointDir) -> None:
        self.files = files
        self._fs = files.fs

    def prepare(self, folder: str = "") -> None:
        """Makes the directory, or one in it, durably: what is in it would be lost with it after a power failure."""
        if folder:
            path = os.path.join(self.files.path, folder)
        else:
            path = self.files.path
        new_folders = self._fs.makedirs(path)
        self._fs.sync_all(os.path.dirname(new_folder) for new_folder in new_folders)

    def names(self) -> list[str]:
        """Every committed checkpoint, sorted."""
        entries = self._entries()
        names = {entry for entry in entries if not entry.startswith(".")}
        # between two renames of a commit the old checkpoint still stands for its name
        names.update(name for name, _, _ in _entries_with_mark("replaced", entries))
        return sorted(names)

    def open(self, name: str) -> PosixCheckpointDir | None:
        """A committed checkpoint, None if there is none of that name."""
        # The name itself first: a listing of thousands of steps costs more than all else here.
        if self._exists(name):
            return self.files.below(name)
        for entry in self._replaced(name):
            if self._exists(entry):
                return self.files.below(entry)
        # Replaced and swept between the two looks: its successor has the name now.
        if self._exists(name):
            return self.files.below(name)
        return None

    def _exists(self, entry: str) -> bool:
        return self._fs.stat(self.files.url + entry) is not None

    def identity(self, name: str) -> str:
        """The uuid of the checkpoint `name`, "damaged" if its manifest is, "" if there is none."""
        directory = self.open(name)
        if directory is None:
            return ""
        try:
            return str(unseal(directory.read(MANIFEST), "")["uuid"])
        except (OSError, ValueError, KeyError):
            return "damaged"

    def foreign_files(self, name: str) -> list[str]:
        """What lies at `name` and is not proven to be a checkpoint's: nobody but its user may remove it."""
        if self._is_no_directory(name):
            return [name]
        return foreign_files(self.files.below(name))

    def _is_no_directory(self, name: str) -> bool:
        path = self.files.url + name
        return os.path.islink(path) or (os.path.exists(path) and not os.path.isdir(path))

    def temporary(self, name: str, uuid: str) -> PosixCheckpointDir:
        """Where the attempt `uuid` writes."""
        return self.files.below(f".tmp-{name}-{uuid}")

    def create(self, name: str, uuid: str, note: bytes) -> None:
        """Makes the temporary, with its first heartbeat. ValueError: a user's files would be replaced."""
        self._check_free(name)
        self._check_outside_checkpoints()
        self.prepare()
        temporary = self.temporary(name, uuid)
        self._fs.mkdir(temporary.path)
        try:
            self._fs.write(temporary.url + _heartbeat(uuid), note, exclusive=True)
            self._fs.mkdir(temporary.url + "receipts")
        except BaseException as error:  # a full disk; an interrupt
            if not isinstance(error, FileExistsError):
                self.abandon(name, uuid)
            raise

    def _check_outside_checkpoints(self) -> None:
        """ValueError: this directory lies inside of a checkpoint, whose next save would remove it."""
        folder = self.files.path
        while folder != os.path.dirname(folder):
            has_manifest = self._fs.stat(f"{folder}/{MANIFEST}") is not None
            if has_manifest and listed_files(PosixCheckpointDir(folder, self._fs)) is not None:
                raise ValueError(f"{folder} is a checkpoint itself; save beside it, not inside")
            folder = os.path.dirname(folder)

    def _check_free(self, name: str) -> None:
        """ValueError: what has the name is more than a checkpoint of ours, or none."""
        path = self.files.url + name
        if self._is_no_directory(name):
            raise ValueError(
                f"{path} is a file or a link, a checkpoint is a directory; choose another name"
            )
        foreign = self.foreign_files(name)
        if not foreign:
            return
        example = f"{foreign[0]}{', …' if len(foreign) > 1 else ''}"
        if listed_files(self.files.below(name)) is not None:
            raise ValueError(
                f"{path} is a checkpoint and holds {len(foreign)} more ({example}), which a save would remove; move "
                "that, or choose another name"
            )
        checkpoints = [
            entry for entry in foreign if self._fs.stat(f"{path}/{entry}/{MANIFEST}") is not None
        ]
        if checkpoints:
            raise ValueError(
                f"{path} holds other checkpoints ({checkpoints[0]}, …), which a save there would remove; choose "
                "another name"
            )
        raise ValueError(
            f"{path} holds {len(foreign)} entries ({example}) and is no checkpoint: a save would replace it; choose "
            "a directory that is empty or does not exist"
        )

    def abandon(self, name: str, uuid: str) -> None:
        """Remove the temporary directory of an attempt: it will not be committed."""
        self._discard([f".tmp-{name}-{uuid}"])

    def note(self, name: str, uuid: str) -> bytes:
        """The `note` that `create` was given."""
        return self.temporary(name, uuid).read(_heartbeat(uuid))

    def beat(self, name: str, uuid: str) -> None:
        """A heartbeat: the temporary is being written."""
        self.temporary(name, uuid).touch(_heartbeat(uuid))

    def last_beat(self, name: str, uuid: str) -> str:
        """A text that every beat changes."""
        return self.temporary(name, uuid).last_touch(_heartbeat(uuid))

    def ages(self) -> dict[tuple[str, str], float]:
        """The age of each temporary, by name and uuid."""
        return self._ages(self._entries())

    def _ages(self, entries: Iterable[str]) -> dict[tuple[str, str], float]:
        ages = {}
        for name, uuid, entry in _entries_with_mark("tmp", entries):
            if is_remains(self.files.below(entry)):
                ages[name, uuid] = self.age(name, uuid)
        return ages

    def exists(self, name: str, uuid: str) -> bool:
        """Whether the attempt's temporary exists."""
        return self._fs.stat(self.temporary(name, uuid).path) is not None

    def age(self, name: str, uuid: str) -> float:
        """Seconds since the temporary was last known to be written; infinite: it is gone."""
        entry = f".tmp-{name}-{uuid}"
        return min(self.files.age(f"{entry}/{_heartbeat(uuid)}"), self.files.age(entry))

    def publish(
        self, name: str, uuid: str, replaces: str, manifest: bytes, files: Iterable[str]
    ) -> bool:
        """Makes the temporary the checkpoint `name`. False: another one took the name meanwhile.

        What it needs is durable before the rename, and the rename before anything of the old checkpoint goes.
        ValueError: a user put files where it goes.
        """
        if self.identity(name) != replaces:
            return False
        # 1. the manifest, and all directory entries, durable: ranks have synced the content of their files
        temporary = self.temporary(name, uuid)
        self._fs.write(temporary.url + MANIFEST, manifest)
        temporary.remove(_heartbeat(uuid))
        folders = [temporary.url + folder for folder in _folders_of_files(files)]
        self._fs.sync_all([temporary.url + MANIFEST, *folders])
        # 2. the old checkpoint steps aside; until 3. it is found under its other name
        self._check_free(name)
        if replaces and self._fs.stat(self.files.url + name) is not None:
            self._fs.rename(self.files.url + name, f"{self.files.url}.replaced-{name}-{uuid}")
        # 3. the commit: an atomic rename, durable when the directory is synced
        if not self._rename(name, uuid):
            return False
        # 4. what was replaced goes last
        self._discard(filter(self._is_checkpoint, self._replaced(name)))
        return True

    def publish_folder(self, name: str, uuid: str) -> bool:
        """Makes the temporary a directory `name` that is no checkpoint. False: the name was taken meanwhile."""
        temporary = self.temporary(name, uuid)
        temporary.remove(_heartbeat(uuid))
        self._fs.rmdir(temporary.url + "receipts")
        self._fs.sync(temporary.path)
        return self._rename(name, uuid)

    def _rename(self, name: str, uuid: str) -> bool:
        try:
            self._fs.rename(self.temporary(name, uuid).path, self.files.url + name)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        self._fs.sync(self.files.path)
        return True

    def remove(self, name: str) -> None:
        """Removes a committed checkpoint, first from the listing, then its files."""
        self._discard(filter(self._is_checkpoint, [*self._replaced(name), name]))

    def sweep(self, stale_s: float, name: str = "", *, thorough: bool = False) -> list[str]:
        """Removes what no one will finish and returns its names; a replaced checkpoint without successor comes back.

        `name` and `thorough` are for stores in which a listing is expensive.
        """
        leftovers, ownerless = self._leftovers(stale_s)
        for name, entry in ownerless:
            if not self._exists(name):
                # another job does the same; it counts as the step anyhow
                with contextlib.suppress(OSError):
                    self._fs.rename(self.files.url + entry, self.files.url + name)
        self._discard(entry for entry in leftovers if not _TRASH.fullmatch(entry))
        for entry in filter(_TRASH.fullmatch, leftovers):
            self._remove(entry)
        return leftovers

    def watch(self, stale_s: float) -> None:
        """Does nothing: the age of each heartbeat is known by the file server's clock."""

    def leftovers(self, stale_s: float, *, thorough: bool = False) -> list[str]:
        """What `sweep` would remove."""
        return self._leftovers(stale_s)[0]

    def _leftovers(self, stale_s: float) -> tuple[list[str], list[tuple[str, str]]]:
        """Entries that nobody needs, and (name, entry) of each replaced checkpoint that no live attempt replaces.

        One listing serves all: two listings could show different moments of a commit.
        """
        entries = self._entries()
        ages = self._ages(entries)
        live = {attempt for attempt, age in ages.items() if age < stale_s}
        ownerless = []
        for name, uuid, entry in _entries_with_mark("replaced", entries):
            if (name, uuid) not in live and self._is_checkpoint(entry):
                ownerless.append((name, entry))
        stale = [f".tmp-{name}-{uuid}" for name, uuid in ages if (name, uuid) not in live]
        succeeded = [entry for name, entry in ownerless if self._exists(name)]
        return [*stale, *succeeded, *filter(self._is_trash, entries)], ownerless

    def _entries(self) -> list[str]:
        return self._fs.listdir(self.files.path)

    def _replaced(self, name: str) -> list[str]:
        return [
            entry
            for other, _, entry in _entries_with_mark("replaced", self._entries())
            if other == name
        ]

    def _is_checkpoint(self, entry: str) -> bool:
        try:
            return not self.foreign_files(entry)
        except OSError:  # another user's
            return False

    def _is_trash(self, entry: str) -> bool:
        """A directory, or a lock that was being given back."""
        if not _TRASH.fullmatch(entry):
            return False
        if is_remains(self.files.below(entry)):
            return True
        path = self.files.url + entry
        is_file = os.path.isfile(path) and not os.path.islink(path)
        return is_file and is_lock(self.files.read(entry))

    def _discard(self, entries: Iterable[str]) -> None:
        """Renames to trash, durably, then removes: after a power loss, too, a name stands for a complete checkpoint.

        Raises no OSError: what cannot be removed now, because a file of it is read over NFS, is left to a sweep.
        """
        renamed = []
        for entry in entries:
            trash = f".trash-{uuid4().hex}"
            try:
                self._fs.rename(self.files.url + entry, self.files.url + trash)
                renamed.append(trash)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("%s%s is left to be removed later: %s", self.files.url, entry, error)
        try:
            if renamed:
                self._fs.sync(self.files.path)
        except OSError as error:
            log.warning("%s: %s are left to be removed later: %s", self.files.url, renamed, error)
            return
        for trash in renamed:
            self._remove(trash)

    def _remove(self, trash: str) -> None:
        """Removes trash, its mark last: after an interrupt the rest is still known as ours."""
        path = self.files.url + trash
        mark = f"{path}/{trash.removeprefix('.trash-')}.trash"
        with contextlib.suppress(OSError):  # a file; a full disk
            self._fs.write(mark, b"")
        try:
            self._fs.remove_tree(path, last=mark)
        except OSError as error:
            log.warning("%s is left to be removed later: %s", path, error)


def _entries_with_mark(mark: str, entries: Iterable[str]) -> list[tuple[str, str, str]]:
    """(name, uuid, entry) of each entry `.mark-name-uuid`."""
    matches = map(_MARKED.fullmatch, entries)
    return [(match[2], match[3], match[0]) for match in matches if match and match[1] == mark]


def _heartbeat(uuid: str) -> str:
    return f"{uuid}.heartbeat"


def _folders_of_files(files: Iterable[str]) -> list[str]:
    """Every directory in which, or below which, one of the files lies."""
    folders = {""}
    for file in files:
        while file := os.path.dirname(file):
            folders.add(file)
    return sorted(folders)
