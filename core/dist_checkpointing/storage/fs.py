"""Every file operation of a checkpoint that is ours: tests stop after each, and drop what no fsync saw."""

import os
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

# of a file that is read as a whole: JSON, of which 70B parameters make 5 MB
MAX_JSON_BYTES = 64 << 20


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor for reading. ValueError: no regular file. A FIFO would be waited for, a device may have no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        check_regular(path, os.fstat(descriptor))
    except ValueError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Raises ValueError: what lies at a path, links followed, is no regular file."""
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise ValueError(
            f"{os.fspath(path)} is {kind}, no regular file: restore it from a copy, or use another step"
        )


class Fs:
    """The operations on a POSIX file system. `threads` of them wait at a time: an fsync is mostly waiting."""

    def __init__(self, threads: int = 32) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-fs")

    # Operations that change something: one step each

    def mkdir(self, path: str) -> None:
        """Makes a directory; it may exist, the one above must. Not durable yet."""
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def write(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """The whole content of a file, not durable yet. `exclusive`: FileExistsError if it exists."""
        with open(path, "xb" if exclusive else "wb") as file:
            file.write(data)

    def sync(self, path: str) -> None:
        """Makes the content of a file, or the entries of a directory, durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """An atomic rename; durable after a sync of the directory."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove one file; durable after a sync of the directory."""
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        os.rmdir(path)

    def touch(self, path: str) -> None:
        """Sets the time of modification to now. FileNotFoundError if the file is gone: it is never created."""
        os.utime(path)

    # Operations that read

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes from `offset`: `length` of them or, at the end of the file, fewer; all if None.

        Raises ValueError: no regular file, or a large one that is to be read as a whole.
        """
        with open(open_regular(path), "rb", buffering=0) as file:
            if length is None and (size := os.fstat(file.fileno()).st_size) > MAX_JSON_BYTES:
                raise ValueError(
                    f"{path} has {size} bytes, of JSON at most {MAX_JSON_BYTES} are read; use another step"
                )
            # a file that is read in part may be of any size
            file.seek(offset)
            if length is None:
                return file.read()
            return file.read(length)

    def listdir(self, path: str) -> list[str]:
        """The names in a directory, sorted; none if there is no such directory."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def stat(self, path: str) -> os.stat_result | None:
        """None if there is no such file."""
        try:
            return os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def walk(self, path: str) -> list[str]:
        """Every file below a directory, as relative paths, sorted."""
        files: list[str] = []
        for folder, _, names in os.walk(path):
            files += [os.path.relpath(os.path.join(folder, name), path) for name in names]
        return sorted(files)

    def entries(self, path: str) -> list[str]:
        """Every file, link and directory below, as relative paths, sorted; none if it is no directory.

        Raises OSError: one of them may not be read.
        """
        paths: list[str] = []
        for folder, folders, names in os.walk(path, onerror=_raise_unless_gone):
            paths += [
                os.path.relpath(os.path.join(folder, name), path) for name in (*folders, *names)
            ]
        return sorted(paths)

    def free_bytes(self, path: str) -> int:
        """What an ordinary user may still write there, or where it will be made."""
        while not os.path.exists(path):
            path = os.path.dirname(path)
        return shutil.disk_usage(path).free

    # Operations that are made of these

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`function` of each item, in threads. All are waited for before the first failure is raised."""
        # all, also after a failure: a thread that still wrote would do so into what the caller gives up
        futures = [self._pool.submit(function, item) for item in items]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def makedirs(self, path: str) -> list[str]:
        """Makes a directory and those above it, and returns the new ones, which are not durable yet."""
        # upwards until one exists, then made from the outermost inwards
        new_folders: list[str] = []
        while path and not os.path.isdir(path):
            new_folders.insert(0, path)
            path = os.path.dirname(path)
        for folder in new_folders:
            self.mkdir(folder)
        return new_folders

    def write_new(self, path: str, data: bytes) -> None:
        """A durable file that must not exist before (its directory's entry is not durable yet)."""
        self.write(path, data, exclusive=True)
        self.sync(path)

    def sync_all(self, paths: Iterable[str]) -> None:
        """`sync` of files and directories, all at once: one after the other they cost 4 ms each."""
        self.map(self.sync, paths)

    def remove_tree(self, path: str, last: str = "") -> None:
        """A directory and all below it, the file `last` of it at the end; or a file, or a link itself.

        Others may be removing it too. Raises OSError: something could not be removed, but all that could be is,
        except `last`.
        """
        if os.path.islink(path) or not os.path.isdir(path):
            self._remove_all([(self.unlink, path)])
            return
        removals: list[tuple[Callable[[str], None], str]] = []
        # bottom up, so that each directory is empty when its turn comes
        for folder, folders, names in os.walk(path, topdown=False):
            removals += [(self.unlink, os.path.join(folder, name)) for name in names]
            for name in folders:
                child = os.path.join(folder, name)
                # links are never followed
                if os.path.islink(child):
                    remove = self.unlink
                else:
                    remove = self.rmdir
                removals.append((remove, child))
        self._remove_all([(remove, child) for remove, child in removals if child != last])
        final: list[tuple[Callable[[str], None], str]] = [(self.rmdir, path)]
        if last:
            final.insert(0, (self.unlink, last))
        self._remove_all(final)

    def _remove_all(self, removals: Iterable[tuple[Callable[[str], None], str]]) -> None:
        """All that can be removed, then the first failure is raised."""
        failures = []
        for remove, path in removals:
            try:
                remove(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
