"""Cells from memory to files and back, by tensorstore: many at a time, never more bytes in flight than the budget."""

import os
from collections import deque
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Protocol

import numpy as np
import tensorstore as ts

from core.dist_checkpointing.format.arrays import ITEMSIZE
from core.dist_checkpointing.format.grid import cell_name, cells
from core.dist_checkpointing.format.zarr_metadata import Chunking, Json, check_metadata
from core.dist_checkpointing.storage.context import CONTEXT, UNSYNCED
from core.dist_checkpointing.storage.fs import check_regular
from core.parallel_state.flat import Box, extent, intersect, relative, slices, whole


class Store(Protocol):
    """Where a checkpoint's files lie."""

    url: str

    @property
    def context(self) -> ts.Context | None:
        """tensorstore's context that `kvstore` belongs to; None: the one of this process."""

    def kvstore(self, prefix: str = "") -> dict[str, Any]:
        """tensorstore's specification of the files below `prefix`."""


class Writer:
    """Writes whole cells, and nothing but cells.

    durable: a cell is on disk, name included, when `finish` returns.
    Raises ValueError: metadata that is not this format's.
    """

    def __init__(
        self, place: Store, metadata: Mapping[str, Json], *, budget_bytes: int = 192 << 20, durable: bool = True
    ) -> None:
        self._arrays = _Arrays(place, metadata, write=True, durable=durable)
        self._flight = _Flight(budget_bytes)
        self._url = place.url
        # A store within this process might keep the memory itself instead of what it held.
        self._lend = place.kvstore()["driver"] != "memory"

    def write(self, key: str, box: Box, array: np.ndarray) -> None:
        """Starts to write one cell, clipped at the array's edge; `array` must not change until `finish`.

        Waits while the budget is used up. After a failure nothing is written any more; `finish` tells.
        Raises ValueError: a box that is not one cell (it would read what is there, and two ranks could lose an
        update), an array of another shape or type.
        """
        store, chunks = self._arrays[key]
        _check(key, box, chunks, array)
        index, cell = next(cells(chunks.shape, chunks.cell, box))
        if cell != box:
            raise ValueError(f"array {key!r}: {box} is not one cell of {chunks.shape} cut into {chunks.cell}")

        def start() -> ts.Future[None]:
            return store[slices(box)].write(array, can_reference_source_data_indefinitely=self._lend).commit

        self._flight.start(f"{key}/{cell_name(index)}", array.nbytes, start, array)

    def finish(self) -> None:
        """Waits for all. Raises OSError: the first cell that could not be written."""
        if failure := self._flight.finish():
            name, error = failure
            raise OSError(f"{self._url}: the cell {name} was not written: {error}") from error


class Reader:
    """Reads boxes of arrays straight into memory that is there. What is read is checked.

    Raises ValueError: metadata that is not this format's.
    """

    def __init__(self, place: Store, metadata: Mapping[str, Json], *, budget_bytes: int = 64 << 20) -> None:
        self._arrays = _Arrays(place, metadata, write=False)
        self._flight = _Flight(budget_bytes)
        self._url = place.url
        store = place.kvstore()
        self._local: str = store["path"] if store["driver"] == "file" else ""

    def read(self, key: str, box: Box, into: np.ndarray) -> None:
        """Starts to read `box` into an array of its shape, with any strides. Waits while the budget is used up.

        After a failure nothing is read any more; `finish` tells.
        Raises ValueError: a box outside of the array, memory of another shape or type.
        """
        store, chunks = self._arrays[key]
        _check(key, box, chunks, into)
        for index, cell in cells(chunks.shape, chunks.cell, box):
            if (part := intersect(cell, box)) is None:
                continue
            where: Any = (*slices(relative(part, box)), ...)  # the dots: a view even of an array without dims
            target = into[where]

            name = f"{key}/{cell_name(index)}"

            def start(part: Box = part, target: np.ndarray = target, name: str = name) -> ts.Future[None]:
                if self._local:
                    _check_file(self._local + name, chunks)
                return ts.array(target, copy=False, write=True).write(store[slices(part)]).commit

            self._flight.start(name, _bytes_to_read(part, chunks), start, target)

    def finish(self) -> None:
        """Waits for all. Raises ValueError: the first cell that is missing or damaged."""
        if failure := self._flight.finish():
            name, error = failure
            raise ValueError(
                f"{self._url}: array {name.rpartition('/')[0]!r}: the cell {name} cannot be read: {error}; "
                "`python -m core.dist_checkpointing verify` lists all damage; load an older step"
            ) from error


class _Arrays:
    """The arrays of one checkpoint, each opened once."""

    def __init__(self, place: Store, metadata: Mapping[str, Json], *, write: bool, durable: bool = True) -> None:
        for key, value in metadata.items():
            check_metadata(key, value)
        self._place, self._metadata, self._write, self._durable = place, metadata, write, durable
        self._open: dict[str, tuple[ts.TensorStore, Chunking]] = {}

    def __getitem__(self, key: str) -> tuple[ts.TensorStore, Chunking]:
        if key not in self._open:
            if key not in self._metadata:
                raise ValueError(f"{self._place.url}: no array {key!r}")
            self._open[key] = self._opened(key), Chunking.from_metadata(self._metadata[key])
        return self._open[key]

    def _opened(self, key: str) -> ts.TensorStore:
        kvstore = self._place.kvstore(key + "/")
        if not self._durable and kvstore["driver"] == "file":
            kvstore |= {"file_io_sync": UNSYNCED}
        spec = {
            "driver": "zarr3",
            "kvstore": kvstore,
            "metadata": self._metadata[key],
            "store_data_equal_to_fill_value": True,  # else a cell of only NaN would have no file
            "fill_missing_data_reads": False,  # a lost cell is an error
        }
        # No zarr.json is read or written. Inside the specification `assume_metadata` would be dropped.
        context = self._place.context or CONTEXT
        return ts.open(
            spec, context=context, read=not self._write, write=self._write, open=True, assume_metadata=True
        ).result()


class _Flight:
    """Operations that have been started, first in, first out, and the first failure of any."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget, self._bytes = budget_bytes, 0
        self._pending: deque[tuple[str, int, ts.Future[None], np.ndarray]] = deque()
        self._failure: tuple[str, Exception] | None = None

    def start(self, name: str, size: int, operation: Callable[[], ts.Future[None]], array: np.ndarray) -> None:
        """Starts an operation on `array`, which is kept alive; one larger than the budget runs alone."""
        while self._pending and self._bytes + size > self._budget:
            self._wait()
        if self._failure is None:
            try:
                self._pending.append((name, size, operation(), array))
            except (OSError, ValueError) as error:
                self._failure = (name, error)
            else:
                self._bytes += size

    def finish(self) -> tuple[str, Exception] | None:
        """After it nothing touches the memory of any operation, failures or not."""
        while self._pending:
            self._wait()
        return self._failure

    def _wait(self) -> None:
        name, size, future, _ = self._pending[0]
        try:
            future.result()  # interrupted, it still is pending
        except Exception as error:  # tensorstore has no type of its own
            self._failure = self._failure or (name, error)
        self._pending.popleft()
        self._bytes -= size


def _check(key: str, box: Box, chunks: Chunking, array: np.ndarray) -> None:
    if len(box) != len(chunks.shape) or intersect(box, whole(chunks.shape)) != box:
        raise ValueError(f"array {key!r}: {box} is not inside its shape {chunks.shape}")
    if array.shape != extent(box) or array.dtype != np.dtype(chunks.data_type):
        wanted = f"{chunks.data_type} of shape {extent(box)}"
        raise ValueError(f"array {key!r}: {wanted} expected for {box}, got {array.dtype} of shape {array.shape}")


def _check_file(path: str, chunks: Chunking) -> None:
    """tensorstore would wait for a FIFO, and end the process where it has no memory for the whole of a file."""
    status = os.stat(path)
    check_regular(path, status)
    if status.st_size > chunks.max_file_bytes:
        raise ValueError(f"{path} has {status.st_size} bytes, a cell of this array at most {chunks.max_file_bytes}")


def _bytes_to_read(box: Box, chunks: Chunking) -> int:
    """What is decoded for a box: everything that shares a checksum with it."""
    touched = (-(-stop // n) * n - start // n * n for (start, stop), n in zip(box, chunks.unit, strict=True))
    return prod(touched) * ITEMSIZE[chunks.data_type]
