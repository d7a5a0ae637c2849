"""One writer per prefix: two that replace the same files in turn would leave halves of both."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO


class LockedError(ValueError):
    """Another writer has the prefix."""


def take_lock(prefix: str | Path) -> BinaryIO | None:
    """A locked file beside the prefix, for `release_lock`; None where the file system has no locks.

    The kernel takes the lock off the dead, so the file that a killed writer leaves stands in nobody's way.
    Raises `LockedError` if another writer has the lock; `OSError`.
    """
    path = _path(prefix)
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                process = file.read(20).decode(errors="replace") or "unknown"
            raise LockedError(
                f"another process ({process}) is writing {prefix}; wait for its end, or choose another prefix"
            ) from None
        except OSError:  # a file system without locks
            file.close()
            path.unlink(missing_ok=True)
            return None
        # its last owner may have removed the file between opening and locking
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                file.write(str(os.getpid()).encode())
                # a full disk: the number is only for the message
                with contextlib.suppress(OSError):
                    file.flush()
                return file
        file.close()


def release_lock(prefix: str | Path, file: BinaryIO | None) -> None:
    """End what `take_lock` began; the file goes first, so that nobody locks one that is about to go."""
    if file is not None:
        _path(prefix).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            file.close()


def is_locked(prefix: str | Path) -> bool:
    """Whether a writer that is alive has the lock."""
    try:
        with _path(prefix).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # there is none, or the file system has no locks
        pass
    return False


def _path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.lock.tmp")
