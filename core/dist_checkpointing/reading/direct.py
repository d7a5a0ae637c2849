"""Cells of local files straight into memory: one system call per cell, and the checksums by the processor.

A twin of `zarr_store.Reader`, which reads anything from anywhere through tensorstore: same calls, same errors. That
one copies each piece twice and computes checksums in software; this one needs a directory, a little-endian machine
and google_crc32c's compiled form (zarr requires the package), and takes little more than half the time.
"""

import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from core.dist_checkpointing.format.grid import cell_name, cells
from core.dist_checkpointing.format.zarr_metadata import Chunks, Json
from core.dist_checkpointing.publish.manifest import Files
from core.dist_checkpointing.storage.fs import open_regular
from core.dist_checkpointing.storage.place import Place, PosixPlace
from core.dist_checkpointing.storage.zarr_store import Reader
from core.parallel_state.flat import Box, intersect, relative, slices

try:
    import google_crc32c

    FAST = google_crc32c.implementation == "c" and sys.byteorder == "little" and hasattr(os, "preadv")
except ImportError:
    FAST = False

THREADS = min(4, os.cpu_count() or 1)  # each has at most one cell beside its place, 16 MiB
_CRC, _ENTRY = 4, 16  # bytes of a checksum, and of a shard's index per piece
_BUFFERS = 512  # of one system call (the system's limit is 1024)


def fastest_reader(
    place: Place, metadata: Mapping[str, Json], files: Files | None, *, budget_bytes: int
) -> "Reader | DirectReader":
    """The fastest reader for a place. files: what the manifest says, to be checked by a reader that can."""
    if FAST and isinstance(place, PosixPlace):
        return DirectReader(place, metadata, files)
    return Reader(place, metadata, budget_bytes=budget_bytes)


class DirectReader:
    """See `zarr_store.Reader`. files: path -> (size, digest); each file read must be that one. None: unchecked."""

    def __init__(self, place: PosixPlace, metadata: Mapping[str, Json], files: Files | None = None) -> None:
        self._place, self._files = place, files
        self._chunks = {key: Chunks.of(value) for key, value in metadata.items()}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-read")
        self._running: list[Future[None]] = []
        self._beside = threading.local()

    def read(self, key: str, box: Box, into: np.ndarray) -> None:
        """Starts to read `box` into an array of its shape, with any strides; it is there when `finish` returns."""
        chunks = self._chunks[key]
        for index, cell in cells(chunks.shape, chunks.cell, box):
            part = intersect(cell, box)
            assert part is not None
            origin = tuple(i * n for i, n in zip(index, chunks.cell, strict=True))
            inside = relative(part, tuple((o, o) for o in origin))
            name = f"{key}/{cell_name(index)}"
            self._running.append(self._pool.submit(self._read, name, chunks, inside, _at(into, relative(part, box))))

    def finish(self) -> None:
        """Waits for all. Raises ValueError: the first cell that is missing or damaged."""
        running, self._running = self._running, []
        problems = [error for future in running if (error := future.exception()) is not None]
        for error in problems:
            if not isinstance(error, (OSError, ValueError)):
                raise error
            raise ValueError(
                f"{error}; `python -m core.dist_checkpointing verify` lists all damage; load an older step"
            ) from error

    def _read(self, name: str, chunks: Chunks, part: Box, into: np.ndarray) -> None:
        path = self._place.url + name
        expected = None if self._files is None else self._files.get(name)
        if self._files is not None and expected is None:
            raise ValueError(f"{path} is not in the manifest")
        descriptor = open_regular(path)
        try:
            cell = _Cell(descriptor, chunks)
            if expected is not None and cell.size != expected[0]:
                raise ValueError(f"it has {cell.size} bytes, the manifest says {expected[0]}")
            cell.read(part, into, self._scratch)
            if expected is not None and cell.digest() != expected[1]:
                raise ValueError("it is not the cell that was saved there, by its digest in the manifest")
        except ValueError as error:
            raise ValueError(f"the cell {path} cannot be read: {error}") from None
        finally:
            os.close(descriptor)

    def _scratch(self, count: int) -> np.ndarray:
        """This thread's own bytes, kept: new memory costs more than what is read into it."""
        kept: np.ndarray | None = getattr(self._beside, "bytes", None)
        if kept is None or kept.size < count:
            kept = self._beside.bytes = np.empty(count, np.uint8)
        return kept[:count]


class _Cell:
    """One file of an array that is open for reading."""

    def __init__(self, descriptor: int, chunks: Chunks) -> None:
        self._file, self._chunks, self.size = descriptor, chunks, os.fstat(descriptor).st_size
        self._table = b""
        self._offsets = {0: 0} if chunks.piece is None else self._index()
        self._crcs: dict[int, bytes] = {}  # offset -> the checksum of the piece there

    def _index(self) -> dict[int, int]:
        """Number of a piece -> where it begins."""
        length = self._chunks.pieces * _ENTRY + _CRC
        if self.size < length:
            raise ValueError(f"{self.size} bytes, its index alone has {length}")
        self._table = os.pread(self._file, length, self.size - length)
        data = np.frombuffer(self._table, np.uint8)
        _verify(data[:-_CRC], self._table[-_CRC:], "its index")
        entries = data[:-_CRC].view("<u8").reshape(-1, 2).tolist()
        return {n: offset for n, (offset, count) in enumerate(entries) if count == self._chunks.unit_bytes + _CRC}

    def digest(self) -> int:
        """See `digest.cell_crc`; the checksums of what was read are known."""
        offsets = sorted(self._offsets.values())
        behind = (self._crcs.get(o) or os.pread(self._file, _CRC, o + self._chunks.unit_bytes) for o in offsets)
        return zlib.crc32(b"".join([*behind, self._table]))

    def read(self, part: Box, into: np.ndarray, scratch: Callable[[int], np.ndarray]) -> None:
        """Every piece that `part` touches: into its place where it lies there in one stretch, else beside it."""
        wanted, beside = [], []
        size = self._chunks.unit_bytes
        for number, box in self._pieces(part):
            both = intersect(box, part)
            assert both is not None
            target = _at(into, relative(both, part))
            if both == box and target.flags.c_contiguous:
                wanted.append((number, target.reshape(-1).view(np.uint8)))
            else:
                beside.append((number, target, relative(both, box)))
        room = scratch(len(beside) * size)
        places = [room[i * size : (i + 1) * size] for i in range(len(beside))]
        self._fill(wanted + [(number, place) for (number, _, _), place in zip(beside, places, strict=True)])
        for (_, target, box), place in zip(beside, places, strict=True):
            target[...] = _at(place.view(into.dtype).reshape(self._chunks.unit), box)

    def _pieces(self, part: Box) -> Iterator[tuple[int, Box]]:
        """Number and box of each piece that `part` touches, in the cell's own coordinates."""
        chunks = self._chunks
        grid = tuple(n // u for n, u in zip(chunks.cell, chunks.unit, strict=True))
        for index, box in cells(chunks.cell, chunks.unit, part):
            number = 0
            for i, n in zip(index, grid, strict=True):
                number = number * n + i
            yield number, box

    def _fill(self, pieces: list[tuple[int, np.ndarray]]) -> None:
        """Reads pieces that lie one behind the other in the file together, each with the checksum behind it."""
        if lost := [number for number, _ in pieces if number not in self._offsets]:
            raise ValueError(f"piece {lost[0]} is not in its index")
        runs: list[list[tuple[int, np.ndarray, bytearray]]] = []
        end = -1
        for offset, memory in sorted(
            ((self._offsets[n], memory) for n, memory in pieces), key=lambda piece: piece[0]
        ):
            if offset != end or 2 * len(runs[-1]) >= _BUFFERS:
                runs.append([])
            runs[-1].append((offset, memory, bytearray(_CRC)))
            end = offset + self._chunks.unit_bytes + _CRC
        for run in runs:
            _read_all(self._file, [buffer for _, memory, crc in run for buffer in (memory, crc)], run[0][0])
            for offset, memory, crc in run:
                self._crcs[offset] = bytes(crc)
                _verify(memory, crc, f"what is at {offset}")


def _at(array: np.ndarray, box: Box) -> np.ndarray:
    where: Any = (*slices(box), ...)  # the dots: a view even of an array without dims
    found: np.ndarray = array[where]
    return found


def _read_all(descriptor: int, buffers: list[Any], offset: int) -> None:
    """A system call may read less than was asked for."""
    sizes = [len(buffer) for buffer in buffers]
    found = os.preadv(descriptor, buffers, offset)
    if found == sum(sizes):
        return
    if not found:
        raise ValueError(f"it ends at {offset}, {sum(sizes)} bytes early")
    starts = np.cumsum([0, *sizes]).tolist()
    rest = [
        memoryview(buffer)[max(0, found - start) :]
        for buffer, (start, stop) in zip(buffers, pairwise(starts), strict=True)
        if stop > found
    ]
    _read_all(descriptor, rest, offset + found)


def crc32c(data: np.ndarray) -> int:
    """Of contiguous bytes, by the processor's instruction."""
    return int(google_crc32c.value(data))


def _verify(data: np.ndarray, crc: bytes | bytearray, what: str) -> None:
    if crc32c(data) != int.from_bytes(crc, "little"):
        raise ValueError(f"{what} is damaged: its crc32c is wrong")
