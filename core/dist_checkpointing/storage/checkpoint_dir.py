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
from core.dist_checkpointing.storage.address import parse_address, split_options
from core.dist_checkpointing.storage.context import CONTEXT
from core.dist_checkpointing.storage.fs import Fs, check_regular
from core.dist_checkpointing.storage.kv_checkpoint_dir import KvCheckpointDir

# entries of a specification that an open store does not show
_SECRET = {"aws_credentials", "gcs_user_project"}
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointDir(Protocol):
    """The files below one directory or prefix. A file that does not exist: FileNotFoundError, unless stated.

    `url` is for messages, and ends in "/".
    """

    url: str

    @property
    def address(self) -> str:
        """What opens the same directory again, options and all."""

    @property
    def context(self) -> ts.Context | None:
        """What a tensorstore of `kvstore()` must be opened with; None: the context of this process."""

    def kvstore(self, prefix: str = "") -> dict[str, Any]:
        """tensorstore's specification of the store below `prefix`."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes from `offset`, `length` or all; fewer at the end of the file."""

    def size(self, name: str, expected: int = 0) -> int | None:
        """Bytes of a file; None: no such file. The right `expected` makes it cheap where stores tell no sizes."""

    def names(self, prefix: str = "") -> list[str]:
        """The names of all files below the directory `prefix`, sorted."""

    def sizes(self) -> dict[str, int]:
        """Bytes of every file."""

    def write(self, name: str, data: bytes) -> None:
        """A file as a whole or not at all, durable."""

    def write_all(self, files: Mapping[str, bytes]) -> None:
        """New files, their content durable (directory entries are by the commit), many at a time."""

    def make_folder(self, folder: str) -> None:
        """A folder that files are written in. FileNotFoundError: the checkpoint's directory is gone."""

    def remove_folder(self, folder: str) -> None:
        """Removes a folder, and all in it; it may be gone already."""

    def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """Changes a file (None: it does not exist) if it still is `old`; of several that try one succeeds."""

    def remove(self, name: str) -> None:
        """Removes a file; it may be gone already."""

    def touch(self, name: str) -> None:
        """A heartbeat: shows that the file's owner is alive."""

    def age(self, name: str) -> float:
        """Seconds since the last `touch`; infinite: no such file."""

    def last_touch(self, name: str) -> str:
        """A text that changes with every `touch`, to be compared only: clocks of hosts differ. "": no such file."""


class DiskFullError(OSError):
    """There is, or was, less space than a checkpoint needs."""

    def __init__(self, url: str, needed: int, free: int) -> None:
        super().__init__(
            errno.ENOSPC,
            f"no space for the checkpoint in {url}: {needed} bytes needed, {free} free; the older checkpoints are "
            "intact: free some space, keep fewer steps or save elsewhere",
        )
        self.needed = needed
        self.free = free


def free_bytes(directory: CheckpointDir) -> int | None:
    """What may still be written there; None: an object store does not say."""
    if isinstance(directory, PosixCheckpointDir):
        return directory.fs.free_bytes(directory.path)
    return None


@contextmanager
def space_for(directory: CheckpointDir, needed: int, *, ahead: bool = True) -> Iterator[None]:
    """Raises DiskFullError if fewer than `needed` bytes are free, or where a full disk stops what runs inside.

    ahead: whether free space is compared first. A full disk is recognized by its text in any OSError, and in the
    ValueError that tensorstore raises.
    """
    # ahead of all else: a save that cannot fit should not fill the disk before it fails
    free = free_bytes(directory) if ahead else None
    if free is not None and free < needed:
        raise DiskFullError(directory.url, needed, free)
    try:
        yield
    except (OSError, ValueError) as error:
        if any(os.strerror(code) in str(error) for code in _FULL_DISK):
            raise DiskFullError(directory.url, needed, free_bytes(directory) or 0) from error
        raise


def open_checkpoint_dir(url: str | os.PathLike[str]) -> CheckpointDir:
    """The checkpoint at a path, "file://…", "gs://bucket/…", "s3://bucket/…" or "memory://…".

    In an object store a checkpoint's name leads to a pointer, which names the prefix that holds the files.
    """
    directory = open_dir(url)
    if isinstance(directory, PosixCheckpointDir):
        return directory
    try:
        pointer = parse_json(directory.read("manifest.json"), f"{directory.url}manifest.json")
    except FileNotFoundError:
        return directory
    # an exported checkpoint may be copied into a store as it is: then this is its manifest, with `files`
    is_pointer = isinstance(pointer, dict) and "files" not in pointer
    uuid = pointer.get("uuid") if is_pointer else None
    if isinstance(uuid, str):
        return directory.below(uuid)
    return directory


def open_dir(
    url: str | os.PathLike[str], fs: Fs | None = None
) -> "PosixCheckpointDir | KvCheckpointDir":
    """What lies exactly at a path or URL: pointers are not followed."""
    address = parse_address(url)
    if address.startswith("/"):
        return PosixCheckpointDir(address, fs or Fs())
    location, options = split_options(address)
    spec = _store_spec(f"{location}/", options)
    try:
        store = ts.KvStore.open(spec, context=CONTEXT).result()
    except ValueError as error:
        if "credentials provider" in str(error) and "profile" in options:
            files = " or ".join(_aws_files().values())
            raise ValueError(
                f"{url}: profile {options['profile']!r} is not found, or not whole, in {files}"
            ) from None
        raise ValueError(
            f"{url}: not a path, file://, gs://, s3:// or memory:// ({error})"
        ) from None
    # credentials are needed again for `kvstore`, and an open store does not give them back
    if isinstance(spec, str):
        secret_spec = {}
    else:
        secret_spec = {name: spec[name] for name in _SECRET & spec.keys()}
    return KvCheckpointDir(store, CONTEXT, f"{location}/", address[len(location) :], secret_spec)


def _aws_files() -> dict[str, str]:
    """Where profiles are; tensorstore finds those files by itself only for the default one."""
    environ = os.environ
    return {
        "credentials_file": environ.get("AWS_SHARED_CREDENTIALS_FILE")
        or os.path.expanduser("~/.aws/credentials"),
        "config_file": environ.get("AWS_CONFIG_FILE") or os.path.expanduser("~/.aws/config"),
    }


def _store_spec(url: str, options: Mapping[str, str]) -> str | dict[str, Any]:
    """What tensorstore opens: the URL, or a specification where options have to be added.

    MinIO, R2 and Ceph are found by their options or as other S3 clients find them, by AWS_ENDPOINT_URL_S3 or
    AWS_ENDPOINT_URL, with AWS_REGION or AWS_DEFAULT_REGION.
    """
    extra: dict[str, Any] = {}
    if url.startswith("s3://"):
        environ = os.environ
        # the address first, then the environment, as every S3 client does
        endpoint = (
            options.get("endpoint")
            or environ.get("AWS_ENDPOINT_URL_S3")
            or environ.get("AWS_ENDPOINT_URL")
        )
        region = options.get("region")
        if endpoint:
            extra["endpoint"] = endpoint.rstrip("/")
            region = (
                region
                or environ.get("AWS_REGION")
                or environ.get("AWS_DEFAULT_REGION")
                or "us-east-1"
            )
        if region:
            extra["aws_region"] = region
        if profile := options.get("profile"):
            extra["aws_credentials"] = {"type": "profile", "profile": profile, **_aws_files()}
        if "conditional_write" in options:
            extra["use_conditional_write"] = options["conditional_write"] == "true"
    if project := options.get("user_project"):
        extra["gcs_user_project"] = {"project_id": project}
    if extra:
        return ts.KvStore.Spec(url).to_json() | extra
    return url


class PosixCheckpointDir:
    """A directory of a local or a mounted file system, as a `CheckpointDir`."""

    context: ts.Context | None = None

    def __init__(self, path: str, fs: Fs) -> None:
        self.path = path
        self.fs = fs
        self.url = self.address = self.path.rstrip("/") + "/"

    def kvstore(self, prefix: str = "") -> dict[str, Any]:
        """tensorstore's file driver below this directory."""
        return {"driver": "file", "path": self.url + prefix}

    def below(self, name: str) -> "PosixCheckpointDir":
        """The directory `name` in it."""
        return PosixCheckpointDir(self.url + name, self.fs)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.fs.read(self.url + name, offset, length)

    def size(self, name: str, expected: int = 0) -> int | None:
        status = self.fs.stat(self.url + name)
        if status is None:
            return None
        check_regular(self.url + name, status)
        return status.st_size

    def names(self, prefix: str = "") -> list[str]:
        return [
            os.path.join(prefix, name) for name in self.fs.walk(os.path.join(self.path, prefix))
        ]

    def sizes(self) -> dict[str, int]:
        sizes = {}
        for name in self.names():
            size = self.size(name)
            if size is not None:  # removed since it was listed
                sizes[name] = size
        return sizes

    def write(self, name: str, data: bytes) -> None:
        """By an atomic rename: the file is written beside and synced first, the directory's entry last."""
        path = self.url + name
        self.fs.write(path + ".part", data)
        self.fs.sync(path + ".part")
        self.fs.rename(path + ".part", path)
        self.fs.sync(os.path.dirname(path))

    def write_all(self, files: Mapping[str, bytes]) -> None:
        # folders first; the files are then written, and synced, in threads
        for folder in sorted({os.path.dirname(name) for name in files}):
            self.make_folder(folder)
        self.fs.map(lambda item: self.fs.write_new(self.url + item[0], item[1]), files.items())

    def make_folder(self, folder: str) -> None:
        """A directory in this one, which must exist: what was removed does not come back by what is still written.

        Raises FileNotFoundError.
        """
        path = self.path
        for name in filter(None, folder.split("/")):
            path = f"{path}/{name}"
            if os.path.isdir(path):
                continue
            try:
                self.fs.mkdir(path)
            except FileNotFoundError:
                reason = "removed meanwhile, or not shared by all hosts"
                raise FileNotFoundError(errno.ENOENT, reason, self.path) from None

    def remove_folder(self, folder: str) -> None:
        if self.fs.stat(self.url + folder) is not None:
            self.fs.remove_tree(self.url + folder)

    def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """By a rename that only one can do; the loser puts back what it should not have taken."""
        path = self.url + name
        aside = f"{self.url}.trash-{uuid4().hex}"
        if old is not None:
            # of two that try, one finds the file and the other finds none
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
        """Sets the file's time of modification."""
        self.fs.touch(self.url + name)

    def age(self, name: str) -> float:
        status = self.fs.stat(self.url + name)
        if status is None:
            return math.inf
        return self._now() - status.st_mtime

    def last_touch(self, name: str) -> str:
        status = self.fs.stat(self.url + name)
        if status is None:
            return ""
        return str(status.st_mtime_ns)

    def _now(self) -> float:
        """By the clock that stamps the files, which is a file server's: that of this host may be minutes off."""
        try:
            self.fs.touch(self.path)
            return os.stat(self.path).st_mtime
        except OSError:  # a directory that may only be read
            return time.time()
