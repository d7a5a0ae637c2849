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
from core.dist_checkpointing.format.zarr_metadata import Chunks, Json, check_metadata
from core.dist_checkpointing.reading.direct import FAST, crc32c
from core.dist_checkpointing.storage.place import Place, PosixPlace
from core.dist_checkpointing.storage.zarr_store import Writer
from core.parallel_state.flat import Box, extent, slices

THREADS = 12  # most of them wait for the disk
_CRC = 4
_PIECES = 256  # of a cell: twice as many buffers go into one system call (the system's limit is 1024)


def fastest_writer(
    place: Place, metadata: Mapping[str, Json], *, durable: bool, budget_bytes: int
) -> "Writer | DirectWriter":
    """The fastest writer for a place."""
    if FAST and isinstance(place, PosixPlace):
        return DirectWriter(place, metadata, durable=durable, budget_bytes=budget_bytes)
    return Writer(place, metadata, durable=durable, budget_bytes=budget_bytes)


class DirectWriter:
    """See `zarr_store.Writer`. entries: path -> (size, digest) of what it wrote by itself."""

    def __init__(self, place: PosixPlace, metadata: Mapping[str, Json], *, durable: bool, budget_bytes: int) -> None:
        for key, value in metadata.items():
            check_metadata(key, value)
        self.entries: dict[str, tuple[int, int]] = {}
        self._place, self._durable, self._budget = place, durable, budget_bytes
        self._chunks = {key: Chunks.of(value) for key, value in metadata.items()}
        self._other = Writer(place, metadata, durable=durable, budget_bytes=budget_bytes)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-write")
        self._running: list[tuple[str, int, Future[None]]] = []
        self._bytes, self._failure = 0, ""
        self._cause: BaseException | None = None
        self._folders: set[str] = set()
        self._beside = threading.local()

    def write(self, key: str, box: Box, array: np.ndarray) -> None:
        """Starts to write one cell; `array` must not change until `finish`. Waits while the budget is used up.

        After a failure nothing is written any more; `finish` tells. Raises ValueError: as its twin.
        """
        chunks = self._chunks.get(key)
        if chunks is None or extent(box) != chunks.cell or chunks.pieces > _PIECES:
            self._other.write(key, box, array)
            return
        index, cell = next(cells(chunks.shape, chunks.cell, box), ((), None))
        if cell != box or array.shape != chunks.cell or array.dtype != np.dtype(chunks.data_type):
            self._other.write(key, box, array)  # says what is wrong
            return
        while self._running and self._bytes + array.nbytes > self._budget:
            self._wait()
        if self._cause is None:
            if key not in self._folders:
                self._place.make_folder(key)
                self._folders.add(key)
            name = f"{key}/{cell_name(index)}"
            self._bytes += array.nbytes
            self._running.append((name, array.nbytes, self._pool.submit(self._write, name, chunks, array)))

    def finish(self) -> None:
        """Waits for all. Raises OSError: the first cell that could not be written."""
        while self._running:
            self._wait()
        self._pool.shutdown()
        self._other.finish()
        if self._cause is not None:
            number = getattr(self._cause, "errno", None)
            message = f"{self._place.url}: the cell {self._failure} was not written: {self._cause}"
            raise (OSError(number, message) if number else OSError(message)) from self._cause

    def _wait(self) -> None:
        name, size, future = self._running.pop(0)
        self._bytes -= size
        error = future.exception()
        if error is not None and self._cause is None:
            self._failure, self._cause = name, error

    def _write(self, name: str, chunks: Chunks, array: np.ndarray) -> None:
        if not array.flags.c_contiguous:
            beside = self._scratch(array.nbytes).view(array.dtype).reshape(array.shape)
            np.copyto(beside, array)
            array = beside
        buffers, crcs = [], []
        for piece in _pieces(array, chunks):
            crc = struct.pack("<I", crc32c(piece))
            buffers += [piece, crc]
            crcs.append(crc)
        table = b"" if chunks.piece is None else _table(len(crcs), chunks.unit_bytes + _CRC)
        descriptor = os.open(self._place.url + name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            size = _write_all(descriptor, [*buffers, table])
            if self._durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.entries[name] = size, zlib.crc32(b"".join([*crcs, table]))

    def _scratch(self, count: int) -> np.ndarray:
        """This thread's own bytes, kept: new memory costs more than the copy."""
        kept: np.ndarray | None = getattr(self._beside, "bytes", None)
        if kept is None or kept.size < count:
            kept = self._beside.bytes = np.empty(count, np.uint8)
        return kept[:count]


def _pieces(array: np.ndarray, chunks: Chunks) -> Iterator[np.ndarray]:
    """The bytes of each piece of a cell, in C order."""
    for _, box in cells(chunks.cell, chunks.unit):
        where: Any = (*slices(box), ...)
        yield np.ascontiguousarray(array[where]).reshape(-1).view(np.uint8)


def _table(pieces: int, stride: int) -> bytes:
    """A shard's index: offset and size of each piece, and its own checksum."""
    numbers = [n for i in range(pieces) for n in (i * stride, stride)]
    table = struct.pack(f"<{len(numbers)}Q", *numbers)
    return table + struct.pack("<I", crc32c(np.frombuffer(table, np.uint8)))


def _write_all(descriptor: int, buffers: list[Any]) -> int:
    """A system call may write less than it was given. Returns the bytes."""
    total, at = sum(len(buffer) for buffer in buffers), 0
    while at < total:
        done = os.pwritev(descriptor, buffers, at)
        at += done
        starts = np.cumsum([0, *(len(buffer) for buffer in buffers)]).tolist()
        buffers = [
            memoryview(buffer)[max(0, done - start) :]
            for buffer, (start, stop) in zip(buffers, pairwise(starts), strict=True)
            if stop > done
        ]
    return total
