"""Cells from memory straight into local files: one system call per cell, and the checksums by the processor.

A twin of `zarr_store.Writer`: the same calls, the same bytes in every file. What it cannot do (cells at an array's
short edge) it hands to tensorstore. That one encodes into new memory, whose pages and copies take more of two cores
than the disk needs.
"""

import os
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from core.dist_checkpointing.format.grid import cell_name, cells
from core.dist_checkpointing.format.zarr_metadata import CRC_BYTES, Chunking, Json, check_metadata
from core.dist_checkpointing.reading.direct import FAST, crc32c
from core.dist_checkpointing.storage.checkpoint_dir import CheckpointDir, PosixCheckpointDir
from core.dist_checkpointing.storage.zarr_store import Writer
from core.parallel_state.flat import Box, extent, slices

THREADS = 12  # most of them wait for the disk
# of a cell: twice as many buffers go into one system call (the system's limit is 1024)
_MAX_UNITS = 256


def fastest_writer(
    directory: CheckpointDir, metadata: Mapping[str, Json], *, durable: bool, budget_bytes: int
) -> "Writer | DirectWriter":
    """The fastest writer for a directory."""
    if FAST and isinstance(directory, PosixCheckpointDir):
        return DirectWriter(directory, metadata, durable=durable, budget_bytes=budget_bytes)
    return Writer(directory, metadata, durable=durable, budget_bytes=budget_bytes)


class DirectWriter:
    """See `zarr_store.Writer`. entries: path -> (size, digest) of the files that tensorstore did not write."""

    def __init__(
        self,
        directory: PosixCheckpointDir,
        metadata: Mapping[str, Json],
        *,
        durable: bool,
        budget_bytes: int,
    ) -> None:
        for key, node in metadata.items():
            check_metadata(key, node)
        self.entries: dict[str, tuple[int, int]] = {}
        self._directory = directory
        self._durable = durable
        self._budget = budget_bytes
        self._chunks = {key: Chunking.from_metadata(node) for key, node in metadata.items()}
        self._tensorstore = Writer(directory, metadata, durable=durable, budget_bytes=budget_bytes)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-write")
        self._running: list[tuple[str, int, Future[None]]] = []
        self._running_bytes = 0
        self._failed_cell = ""
        self._failure: BaseException | None = None
        self._folders: set[str] = set()
        self._per_thread = threading.local()

    def write(self, key: str, box: Box, array: np.ndarray) -> None:
        """Starts to write one cell; `array` must not change until `finish`. Waits while the budget is used up.

        After a failure nothing is written any more; `finish` raises it. Raises ValueError: as its twin.
        """
        chunks = self._chunks.get(key)
        if chunks is None or extent(box) != chunks.cell or chunks.units_per_cell > _MAX_UNITS:
            self._tensorstore.write(key, box, array)
            return
        # a full cell exactly: its file has all units, so the index can be computed in advance
        index, cell = next(cells(chunks.shape, chunks.cell, box), ((), None))
        if cell != box or array.shape != chunks.cell or array.dtype != np.dtype(chunks.data_type):
            # raises, and says what is wrong
            self._tensorstore.write(key, box, array)
            return
        # assembled cells live until they are written: the budget bounds their memory
        while self._running and self._running_bytes + array.nbytes > self._budget:
            self._wait_for_first()
        if self._failure is None:
            if key not in self._folders:
                self._directory.make_folder(key)
                self._folders.add(key)
            name = f"{key}/{cell_name(index)}"
            self._running_bytes += array.nbytes
            future = self._pool.submit(self._write_cell, name, chunks, array)
            self._running.append((name, array.nbytes, future))

    def finish(self) -> None:
        """Waits for all. Raises OSError: the first cell that could not be written."""
        while self._running:
            self._wait_for_first()
        self._pool.shutdown()
        self._tensorstore.finish()
        if self._failure is not None:
            message = f"{self._directory.url}: the cell {self._failed_cell} was not written: {self._failure}"
            error_number = getattr(self._failure, "errno", None)
            if error_number:
                error = OSError(error_number, message)
            else:
                error = OSError(message)
            raise error from self._failure

    def _wait_for_first(self) -> None:
        name, size, future = self._running.pop(0)
        self._running_bytes -= size
        error = future.exception()
        if error is not None and self._failure is None:
            self._failed_cell = name
            self._failure = error

    def _write_cell(self, name: str, chunks: Chunking, array: np.ndarray) -> None:
        if not array.flags.c_contiguous:
            scratch = self._scratch(array.nbytes).view(array.dtype).reshape(array.shape)
            np.copyto(scratch, array)
            array = scratch
        # zarr's sharding codec: every inner chunk with its crc32c behind it, then the index
        buffers = []
        crcs = []
        for unit in _units(array, chunks):
            crc = struct.pack("<I", crc32c(unit))
            buffers += [unit, crc]
            crcs.append(crc)
        index = b""
        if chunks.inner is not None:
            index = _shard_index(len(crcs), chunks.unit_bytes + CRC_BYTES)
        # O_EXCL: two ranks that wrote one cell would be a bug of the plan, and must not pass unseen
        descriptor = os.open(
            self._directory.url + name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666
        )
        try:
            size = _write_all(descriptor, [*buffers, index])
            if self._durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.entries[name] = size, zlib.crc32(b"".join([*crcs, index]))

    def _scratch(self, count: int) -> np.ndarray:
        """`count` bytes of this thread, which keeps them: new memory costs more than the copy."""
        scratch: np.ndarray | None = getattr(self._per_thread, "scratch", None)
        if scratch is None or scratch.size < count:
            scratch = self._per_thread.scratch = np.empty(count, np.uint8)
        return scratch[:count]


def _units(array: np.ndarray, chunks: Chunking) -> Iterator[np.ndarray]:
    """The bytes of each unit of a cell, in C order."""
    for _, box in cells(chunks.cell, chunks.unit):
        # the dots: a view even of an array without dims
        index: Any = (*slices(box), ...)
        yield np.ascontiguousarray(array[index]).reshape(-1).view(np.uint8)


def _shard_index(units: int, stride: int) -> bytes:
    """A cell's index: offset and length of each unit, `stride` bytes apart, and the index's own checksum."""
    numbers: list[int] = []
    for number in range(units):
        numbers += (number * stride, stride)
    index = struct.pack(f"<{len(numbers)}Q", *numbers)
    return index + struct.pack("<I", crc32c(np.frombuffer(index, np.uint8)))


def _write_all(descriptor: int, buffers: list[Any]) -> int:
    """Writes all buffers from the file's start and returns their bytes; a system call may write fewer than given."""
    total = sum(len(buffer) for buffer in buffers)
    position = 0
    while position < total:
        count = os.pwritev(descriptor, buffers, position)
        position += count
        starts = np.cumsum([0, *(len(buffer) for buffer in buffers)]).tolist()
        unwritten = []
        for buffer, (start, stop) in zip(buffers, pairwise(starts), strict=True):
            if stop > count:
                unwritten.append(memoryview(buffer)[max(0, count - start) :])
        buffers = unwritten
    return total
