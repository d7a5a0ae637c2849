"""Memory that a trainer fills and a writer program reads: without a name, so nothing is left behind by a kill."""

import mmap
import os
import tempfile

import numpy as np

SLAB_ALIGN = 64  # bytes


class Slab:
    """One growing block of shared memory, `fd` its descriptor. Growing touches every new page: copies are fast then.

    A view of it (`array`) must not outlive the next `reserve`.
    """

    def __init__(self, fd: int | None = None, size: int = 0) -> None:
        self.fd = fd if fd is not None else _anonymous_file()
        self._size = 0
        self._memory = np.empty(0, np.uint8)
        if size:
            self._map(size)

    @property
    def size(self) -> int:
        """Size of the shared memory in bytes."""
        return self._size

    def reserve(self, size: int) -> None:
        """Make it at least `size` bytes. Raises OSError: no memory."""
        if size > self._size:
            # allocated now: a page that the system cannot give later would kill the trainer during its copy
            os.posix_fallocate(self.fd, 0, size)
            old_size = self._size
            self._map(size)
            # page faults happen here, not in the stall of a save
            self._memory[old_size :: mmap.PAGESIZE] = 0

    def array(self, offset: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """A view of the shared memory as an array; nothing is copied."""
        byte_count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self._memory[offset : offset + byte_count].view(dtype).reshape(shape)

    def _map(self, size: int) -> None:
        self._memory = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        self._size = size

    def close(self) -> None:
        """Give the memory back, once the other side has too."""
        self._memory = np.empty(0, np.uint8)
        self._size = 0
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint", 0)
    with tempfile.TemporaryFile() as file:  # unlinked at once
        return os.dup(file.fileno())


def aligned(size: int) -> int:
    """The next offset that any dtype may start at."""
    return -(-size // SLAB_ALIGN) * SLAB_ALIGN
