"""Where the files of one checkpoint lie: a directory, or an object store's prefix. Names are relative, with "/"."""

import errno
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from uuid import uuid4

import tensorstore as ts

from core.dist_checkpointing.format.json_files import parse_json
from core.dist_checkpointing.storage.address import parse_address, place_and_options
from core.dist_checkpointing.storage.context import CONTEXT
from core.dist_checkpointing.storage.fs import Fs, check_regular
from core.dist_checkpointing.storage.kv_place import KvPlace

_UNSAID = {"aws_credentials", "gcs_user_project"}  # of a specification; an open store does not tell it
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Place(Protocol):
    """The files below one directory or prefix. A file that is not there: FileNotFoundError, or what is said.

    `context` is what a tensorstore of `kvstore()` must be opened with; None: the one of this process.
    `url` is told, and ends in "/"; `address` is what opens the same place again, options and all.
    """

    url: str

    @property
    def address(self) -> str:
        """What opens the same place again, options and all."""

    @property
    def context(self) -> ts.Context | None:
        """What tensorstore opens this place with; None: the process's one."""

    def kvstore(self, prefix: str = "") -> dict[str, Any]:
        """tensorstore's specification of the store below `prefix`."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes from `offset`, `length` or all; fewer at the end of the file."""

    def size(self, name: str, expected: int = 0) -> int | None:
        """Bytes of a file; None: not there. The right `expected` makes it cheap where sizes cannot be asked for."""

    def names(self, prefix: str = "") -> list[str]:
        """The names of all files below the directory `prefix`, sorted."""

    def sizes(self) -> dict[str, int]:
        """Bytes of every file."""

    def write(self, name: str, data: bytes) -> None:
        """A file as a whole or not at all, durable."""

    def write_all(self, files: Mapping[str, bytes]) -> None:
        """New files, their content durable (directory entries are by the commit), many at a time."""

    def make_folder(self, folder: str) -> None:
        """What files are written in. FileNotFoundError: the place is gone."""

    def remove_folder(self, folder: str) -> None:
        """Removes a folder, and all in it; it may be gone already."""

    def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """Changes a file (None: not there) if it still is `old`; of several that try one succeeds."""

    def remove(self, name: str) -> None:
        """Removes a file; it may be gone already."""

    def touch(self, name: str) -> None:
        """Says that the file's owner is alive."""

    def age(self, name: str) -> float:
        """Seconds since the last `touch`; infinite: no such file."""

    def last_touch(self, name: str) -> str:
        """What every `touch` changes, and which says nothing else: clocks of hosts differ. "": no such file."""


class DiskFullError(OSError):
    """There is, or was, less space than a checkpoint needs."""

    def __init__(self, url: str, needed: int, free: int) -> None:
        super().__init__(
            errno.ENOSPC,
            f"no space for the checkpoint in {url}: {needed} bytes needed, {free} free; the older checkpoints are "
            "intact: free some space, keep fewer steps or save elsewhere",
        )
        self.needed, self.free = needed, free


def free_bytes(place: Place) -> int | None:
    """What may still be written there; None: an object store does not say."""
    return place.fs.free_bytes(place.path) if isinstance(place, PosixPlace) else None


@contextmanager
def space_for(place: Place, needed: int, *, ahead: bool = True) -> Iterator[None]:
    """Raises DiskFullError if fewer than `needed` bytes are free (`ahead`: before all else), and in the stead of what
    a full disk raises inside: of OSError, and of tensorstore's ValueError."""
    free = free_bytes(place) if ahead else None
    if free is not None and free < needed:
        raise DiskFullError(place.url, needed, free)
    try:
        yield
    except (OSError, ValueError) as error:
        if any(os.strerror(code) in str(error) for code in _FULL):
            raise DiskFullError(place.url, needed, free_bytes(place) or 0) from error
        raise


def open_place(url: str | os.PathLike[str]) -> Place:
    """The checkpoint at a path, "file://…", "gs://bucket/…", "s3://bucket/…" or "memory://…"."""
    store = open_store(url)
    if isinstance(store, PosixPlace):
        return store
    try:
        pointer = parse_json(store.read("manifest.json"), f"{store.url}manifest.json")
    except FileNotFoundError:
        return store
    uuid = pointer.get("uuid") if isinstance(pointer, dict) and "files" not in pointer else None
    return store.below(uuid) if isinstance(uuid, str) else store


def open_store(url: str | os.PathLike[str], fs: Fs | None = None) -> "PosixPlace | KvPlace":
    """What lies exactly at a path or URL, whatever it is."""
    address = parse_address(url)
    if address.startswith("/"):
        return PosixPlace(address, fs or Fs())
    where, options = place_and_options(address)
    spec = _spec(f"{where}/", options)
    try:
        store = ts.KvStore.open(spec, context=CONTEXT).result()
    except ValueError as error:
        if "credentials provider" in str(error) and "profile" in options:
            why = (
                f"profile {options['profile']!r} is not found, or not whole, in {' or '.join(_aws_files().values())}"
            )
            raise ValueError(f"{url}: {why}") from None
        raise ValueError(f"{url}: not a path, file://, gs://, s3:// or memory:// ({error})") from None
    unsaid = {} if isinstance(spec, str) else {name: spec[name] for name in _UNSAID & spec.keys()}
    return KvPlace(store, CONTEXT, f"{where}/", address[len(where) :], unsaid)


def _aws_files() -> dict[str, str]:
    """Where profiles are; tensorstore finds those files by itself only for the default one."""
    told = os.environ
    return {
        "credentials_file": told.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials"),
        "config_file": told.get("AWS_CONFIG_FILE") or os.path.expanduser("~/.aws/config"),
    }


def _spec(url: str, options: Mapping[str, str]) -> str | dict[str, Any]:
    """What tensorstore opens. MinIO, R2 and Ceph are found by their options or as other S3 clients find them, by
    AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, with AWS_REGION or AWS_DEFAULT_REGION."""
    more: dict[str, Any] = {}
    if url.startswith("s3://"):
        told = os.environ
        endpoint = options.get("endpoint") or told.get("AWS_ENDPOINT_URL_S3") or told.get("AWS_ENDPOINT_URL")
        region = options.get("region")
        if endpoint:
            more["endpoint"] = endpoint.rstrip("/")
            region = region or told.get("AWS_REGION") or told.get("AWS_DEFAULT_REGION") or "us-east-1"
        if region:
            more["aws_region"] = region
        if profile := options.get("profile"):
            more["aws_credentials"] = {"type": "profile", "profile": profile, **_aws_files()}
        if "conditional_write" in options:
            more["use_conditional_write"] = options["conditional_write"] == "true"
    if project := options.get("user_project"):
        more["gcs_user_project"] = {"project_id": project}
    return ts.KvStore.Spec(url).to_json() | more if more else url


class PosixPlace:
    """A directory of a local or a mounted file system."""

    context: ts.Context | None = None

    def __init__(self, path: str, fs: Fs) -> None:
        self.path, self.fs = path, fs
        self.url = self.address = self.path.rstrip("/") + "/"

    def kvstore(self, prefix: str = "") -> dict[str, Any]:
        """tensorstore's file driver below this directory."""
        return {"driver": "file", "path": self.url + prefix}

    def below(self, name: str) -> "PosixPlace":
        """The directory `name` in it."""
        return PosixPlace(self.url + name, self.fs)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.fs.read(self.url + name, offset, length)

    def size(self, name: str, expected: int = 0) -> int | None:
        status = self.fs.stat(self.url + name)
        if status is not None:
            check_regular(self.url + name, status)
        return None if status is None else status.st_size

    def names(self, prefix: str = "") -> list[str]:
        return [os.path.join(prefix, name) for name in self.fs.walk(os.path.join(self.path, prefix))]

    def sizes(self) -> dict[str, int]:
        return {name: size for name in self.names() if (size := self.size(name)) is not None}

    def write(self, name: str, data: bytes) -> None:
        """By a part that is renamed."""
        path = self.url + name
        self.fs.write(path + ".part", data)
        self.fs.sync(path + ".part")
        self.fs.rename(path + ".part", path)
        self.fs.sync(os.path.dirname(path))

    def write_all(self, files: Mapping[str, bytes]) -> None:
        for folder in sorted({os.path.dirname(name) for name in files}):
            self.make_folder(folder)
        self.fs.map(lambda item: self.fs.write_new(self.url + item[0], item[1]), files.items())

    def make_folder(self, folder: str) -> None:
        """A directory in this one, which must be there: what was removed does not come back by what is still written.
        Raises FileNotFoundError."""
        path = self.path
        for part in filter(None, folder.split("/")):
            path = f"{path}/{part}"
            if os.path.isdir(path):
                continue
            try:
                self.fs.mkdir(path)
            except FileNotFoundError:
                why = "removed meanwhile, or not shared by all hosts"
                raise FileNotFoundError(errno.ENOENT, why, self.path) from None

    def remove_folder(self, folder: str) -> None:
        if self.fs.stat(self.url + folder) is not None:
            self.fs.remove_tree(self.url + folder)

    def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """By a rename that only one can do; the loser puts back what it should not have taken."""
        path, aside = self.url + name, f"{self.url}.trash-{uuid4().hex}"
        if old is not None:
            try:
                self.fs.rename(path, aside)
            except FileNotFoundError:
                return False
            if self.fs.read(aside) != old:
                self.fs.rename(aside, path)
                return False
            self.fs.unlink(aside)
        if new is not None:
            try:
                self.fs.write(path, new, exclusive=True)
            except FileExistsError:
                return False
        return True

    def remove(self, name: str) -> None:
        if self.fs.stat(self.url + name) is not None:
            self.fs.unlink(self.url + name)

    def touch(self, name: str) -> None:
        """By its time of modification."""
        self.fs.touch(self.url + name)

    def age(self, name: str) -> float:
        status = self.fs.stat(self.url + name)
        return math.inf if status is None else self._now() - status.st_mtime

    def last_touch(self, name: str) -> str:
        status = self.fs.stat(self.url + name)
        return "" if status is None else str(status.st_mtime_ns)

    def _now(self) -> float:
        """By the clock that stamps the files, which is a file server's: that of this host may be minutes off."""
        try:
            self.fs.touch(self.path)
            return os.stat(self.path).st_mtime
        except OSError:  # may only be read
            return time.time()
