"""Cells straight into memory: one system call, or one request to an object store, per cell that is needed as a whole.

A twin of `zarr_store.Reader`, which reads anything from anywhere through tensorstore: same calls, same errors. That
one copies every inner chunk twice, computes checksums in software, and asks an object store for the index, each inner
chunk and the digest apart. This one needs a little-endian machine and google_crc32c's compiled form (zarr requires
the package), and takes little more than half the time.
"""

import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import numpy as np

from core.dist_checkpointing.format.grid import cell_name, cells
from core.dist_checkpointing.format.zarr_metadata import CRC_BYTES, Chunking, Json
from core.dist_checkpointing.publish.manifest import Files
from core.dist_checkpointing.storage.checkpoint_dir import CheckpointDir, PosixCheckpointDir
from core.dist_checkpointing.storage.fs import open_regular
from core.dist_checkpointing.storage.zarr_store import Reader
from core.parallel_state.flat import Box, intersect, relative, slices, volume

try:
    import google_crc32c

    FAST = (
        google_crc32c.implementation == "c" and sys.byteorder == "little" and hasattr(os, "preadv")
    )
except ImportError:
    FAST = False

# each holds at most one cell of scratch memory, 16 MiB
THREADS = min(4, os.cpu_count() or 1)
# to an object store at a time: there a thread mostly waits
REQUESTS = 8
# of one system call (the system's limit is 1024)
_MAX_BUFFERS = 512


def fastest_reader(
    directory: CheckpointDir,
    metadata: Mapping[str, Json],
    files: Files | None,
    *,
    budget_bytes: int,
) -> "Reader | DirectReader":
    """The fastest reader for a directory. files: what the manifest says, to be checked by a reader that can."""
    if FAST:
        return DirectReader(directory, metadata, files)
    return Reader(directory, metadata, budget_bytes=budget_bytes)


class DirectReader:
    """See `zarr_store.Reader`. files: path -> (size, digest); each file read must be that one. None: unchecked."""

    def __init__(
        self, directory: CheckpointDir, metadata: Mapping[str, Json], files: Files | None = None
    ) -> None:
        self._directory = directory
        self._files = files
        self._chunks = {key: Chunking.from_metadata(node) for key, node in metadata.items()}
        if isinstance(directory, PosixCheckpointDir):
            threads = THREADS
        else:
            threads = REQUESTS
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read")
        self._running: list[Future[None]] = []
        self._per_thread = threading.local()

    def read(self, key: str, box: Box, into: np.ndarray) -> None:
        """Starts to read `box` into an array of its shape, with any strides; it is there when `finish` returns."""
        chunks = self._chunks[key]
        for index, cell in cells(chunks.shape, chunks.cell, box):
            overlap = intersect(cell, box)
            assert overlap is not None
            # not `cell`, which is clipped at the array's edge: a file counts from the corner of the full cell
            origin = tuple((i * size, i * size) for i, size in zip(index, chunks.cell, strict=True))
            box_in_cell = relative(overlap, origin)
            target = _view(into, relative(overlap, box))
            name = f"{key}/{cell_name(index)}"
            self._running.append(
                self._pool.submit(self._read_cell, name, chunks, box_in_cell, target)
            )

    def finish(self) -> None:
        """Waits for all. Raises ValueError: the first cell that is missing or damaged."""
        # emptied first: after a failure the reader can be used again
        running = self._running
        self._running = []
        # waits for every one: their memory is the caller's
        errors = [future.exception() for future in running]
        for error in errors:
            if error is None:
                continue
            if not isinstance(error, (OSError, ValueError)):
                raise error
            raise ValueError(
                f"{error}; `python -m core.dist_checkpointing verify` lists all damage; load an older step"
            ) from error

    def _read_cell(self, name: str, chunks: Chunking, box_in_cell: Box, into: np.ndarray) -> None:
        path = self._directory.url + name
        expected = None
        if self._files is not None:
            expected = self._files.get(name)
            if expected is None:
                raise ValueError(f"{path} is not in the manifest")
        share = volume(box_in_cell) / prod(chunks.cell)
        try:
            with closing(self._open(name, share, expected)) as file:
                self._read_file(file, chunks, box_in_cell, into, expected)
        except ValueError as error:
            raise ValueError(f"the cell {path} cannot be read: {error}") from None

    def _open(self, name: str, share: float, expected: tuple[int, int] | None) -> "_File":
        """The file of a cell of which a share is needed."""
        if isinstance(self._directory, PosixCheckpointDir):
            return _LocalFile(open_regular(self._directory.url + name))
        # of an object store each request costs more than the bytes that are not needed
        if 4 * share >= 1 or expected is None:
            return _Object(self._directory.read(name))
        size = self._directory.size(name, expected[0])
        if size is None:
            raise FileNotFoundError(self._directory.url + name)
        return _ObjectParts(self._directory, name, size)

    def _read_file(
        self,
        file: "_File",
        chunks: Chunking,
        box_in_cell: Box,
        into: np.ndarray,
        expected: tuple[int, int] | None,
    ) -> None:
        cell = _CellFile(file, chunks)
        if expected is not None and cell.size != expected[0]:
            raise ValueError(f"it has {cell.size} bytes, the manifest says {expected[0]}")
        cell.read(box_in_cell, into, self._scratch)
        # after reading: the checksums of the chunks that were read are known then
        if expected is not None and cell.digest() != expected[1]:
            raise ValueError(
                "it is not the cell that was saved there, by its digest in the manifest"
            )

    def _scratch(self, count: int) -> np.ndarray:
        """`count` bytes of this thread, which keeps them: new memory costs more than what is read into it."""
        scratch: np.ndarray | None = getattr(self._per_thread, "scratch", None)
        if scratch is None or scratch.size < count:
            scratch = self._per_thread.scratch = np.empty(count, np.uint8)
        return scratch[:count]


class _File(Protocol):
    """Bytes of one cell, wherever they are."""

    size: int

    def read_at(self, count: int, offset: int) -> bytes:
        """`count` bytes, or fewer at the end."""
        ...

    def read_into(self, buffers: list[Any], offset: int) -> None:
        """Fills all buffers. Raises ValueError: it ends before."""
        ...

    def close(self) -> None: ...


class _LocalFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_at(self, count: int, offset: int) -> bytes:
        return os.pread(self._descriptor, count, offset)

    def read_into(self, buffers: list[Any], offset: int) -> None:
        _read_all(self._descriptor, buffers, offset)

    def close(self) -> None:
        os.close(self._descriptor)


class _Object:
    """An object that one request brought."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def read_at(self, count: int, offset: int) -> bytes:
        return bytes(self._data[offset : offset + count])

    def read_into(self, buffers: list[Any], offset: int) -> None:
        missing = offset + sum(len(buffer) for buffer in buffers) - self.size
        if missing > 0:
            raise ValueError(f"it ends at {self.size}, {missing} bytes early")
        for buffer in buffers:
            memoryview(buffer)[:] = self._data[offset : offset + len(buffer)]
            offset += len(buffer)

    def close(self) -> None:
        pass


class _ObjectParts:
    """An object of which each read is a request for a range."""

    def __init__(self, directory: CheckpointDir, name: str, size: int) -> None:
        self._directory = directory
        self._name = name
        self.size = size

    def read_at(self, count: int, offset: int) -> bytes:
        return self._directory.read(self._name, offset, min(count, self.size - offset))

    def read_into(self, buffers: list[Any], offset: int) -> None:
        count = sum(len(buffer) for buffer in buffers)
        _Object(self.read_at(count, offset)).read_into(buffers, 0)

    def close(self) -> None:
        pass


class _CellFile:
    """One file of an array that is open for reading."""

    def __init__(self, file: _File, chunks: Chunking) -> None:
        self._file = file
        self._chunks = chunks
        self.size = file.size
        self._index = b""
        if chunks.inner is None:
            self._offsets = {0: 0}
        else:
            self._offsets = self._read_index()
        # offset of an inner chunk that was read -> its checksum
        self._crcs: dict[int, bytes] = {}

    def _read_index(self) -> dict[int, int]:
        """Number of an inner chunk -> where it begins in the file."""
        length = self._chunks.index_bytes
        if self.size < length:
            raise ValueError(f"{self.size} bytes, its index alone has {length}")
        self._index = self._file.read_at(length, self.size - length)
        data = np.frombuffer(self._index, np.uint8)
        _verify(data[:-CRC_BYTES], self._index[-CRC_BYTES:], "its index")
        entries = data[:-CRC_BYTES].view("<u8").reshape(-1, 2).tolist()
        # entries of another length lie outside of the array
        stored_bytes = self._chunks.unit_bytes + CRC_BYTES
        return {
            number: offset
            for number, (offset, chunk_bytes) in enumerate(entries)
            if chunk_bytes == stored_bytes
        }

    def digest(self) -> int:
        """See `digest.cell_crc`; the checksums of what was read are known."""
        crcs = [self._crc_at(offset) for offset in sorted(self._offsets.values())]
        return zlib.crc32(b"".join([*crcs, self._index]))

    def _crc_at(self, offset: int) -> bytes:
        """The checksum behind the inner chunk at `offset`."""
        return self._crcs.get(offset) or self._file.read_at(
            CRC_BYTES, offset + self._chunks.unit_bytes
        )

    def read(self, box: Box, into: np.ndarray, scratch: Callable[[int], np.ndarray]) -> None:
        """Every inner chunk that `box` touches: straight to its target if that is contiguous, else via scratch."""
        direct = []
        indirect = []
        unit_bytes = self._chunks.unit_bytes
        for number, unit_box in self._units(box):
            overlap = intersect(unit_box, box)
            assert overlap is not None
            target = _view(into, relative(overlap, box))
            if overlap == unit_box and target.flags.c_contiguous:
                direct.append((number, target.reshape(-1).view(np.uint8)))
            else:
                indirect.append((number, target, relative(overlap, unit_box)))
        memory = scratch(len(indirect) * unit_bytes).reshape(len(indirect), unit_bytes)
        staged = [(number, memory[row]) for row, (number, _, _) in enumerate(indirect)]
        self._fill(direct + staged)
        # what was needed of a unit only in part, or goes to strided memory, is copied from scratch
        for (_, target, overlap), (_, unit_memory) in zip(indirect, staged, strict=True):
            unit_array = unit_memory.view(into.dtype).reshape(self._chunks.unit)
            target[...] = _view(unit_array, overlap)

    def _units(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Number and box of each unit that `box` touches, in the cell's own coordinates."""
        chunks = self._chunks
        grid = tuple(size // unit for size, unit in zip(chunks.cell, chunks.unit, strict=True))
        for index, unit_box in cells(chunks.cell, chunks.unit, box):
            number = 0  # in C order
            for position, count in zip(index, grid, strict=True):
                number = number * count + position
            yield number, unit_box

    def _fill(self, units: list[tuple[int, np.ndarray]]) -> None:
        """Reads units into memory, neighbours in the file by one call, each with the checksum behind it."""
        for number, _ in units:
            if number not in self._offsets:
                raise ValueError(f"piece {number} is not in its index")
        by_offset = sorted(
            [(self._offsets[number], memory) for number, memory in units], key=lambda unit: unit[0]
        )
        runs: list[list[tuple[int, np.ndarray, bytearray]]] = []
        end = -1
        for offset, memory in by_offset:
            # two buffers for each unit: payload and checksum
            if offset != end or 2 * len(runs[-1]) >= _MAX_BUFFERS:
                runs.append([])
            runs[-1].append((offset, memory, bytearray(CRC_BYTES)))
            end = offset + self._chunks.unit_bytes + CRC_BYTES
        for run in runs:
            buffers: list[Any] = []
            for _, memory, crc in run:
                buffers += (memory, crc)
            first_offset = run[0][0]
            self._file.read_into(buffers, first_offset)
            for offset, memory, crc in run:
                self._crcs[offset] = bytes(crc)
                _verify(memory, crc, f"what is at {offset}")


def _view(array: np.ndarray, box: Box) -> np.ndarray:
    # the dots: a view even of an array without dims
    index: Any = (*slices(box), ...)
    view: np.ndarray = array[index]
    return view


def _read_all(descriptor: int, buffers: list[Any], offset: int) -> None:
    """Fill buffers from a file; a system call may read less than was asked for, and is repeated for the rest."""
    sizes = [len(buffer) for buffer in buffers]
    count = os.preadv(descriptor, buffers, offset)
    if count == sum(sizes):
        return
    if not count:
        raise ValueError(f"it ends at {offset}, {sum(sizes)} bytes early")
    starts = np.cumsum([0, *sizes]).tolist()
    unfilled = []
    for buffer, (start, stop) in zip(buffers, pairwise(starts), strict=True):
        if stop > count:
            unfilled.append(memoryview(buffer)[max(0, count - start) :])
    _read_all(descriptor, unfilled, offset + count)


def crc32c(data: np.ndarray) -> int:
    """Of contiguous bytes, by the processor's instruction."""
    return int(google_crc32c.value(data))


def _verify(data: np.ndarray, crc: bytes | bytearray, name: str) -> None:
    if crc32c(data) != int.from_bytes(crc, "little"):
        raise ValueError(f"{name} is damaged: its crc32c is wrong")
