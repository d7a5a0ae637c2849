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
    """Where a checkpoint's files lie, as far as tensorstore has to know it: any `CheckpointDir` is one."""

    url: str

    @property
    def context(self) -> ts.Context | None:
        """tensorstore's context that `kvstore` belongs to; None: the one of this process."""

    def kvstore(self, prefix: str = "") -> dict[str, Any]:
        """tensorstore's specification of the files below `prefix`."""


class Writer:
    """Writes complete cells, and nothing but cells.

    durable: a cell is on disk, name included, when `finish` returns.
    Raises ValueError: metadata that is not this format's.
    """

    def __init__(
        self,
        directory: Store,
        metadata: Mapping[str, Json],
        *,
        budget_bytes: int = 192 << 20,
        durable: bool = True,
    ) -> None:
        self._arrays = _OpenArrays(directory, metadata, write=True, durable=durable)
        self._operations = _Operations(budget_bytes)
        self._url = directory.url
        # A store within this process might keep the memory itself instead of what it held.
        self._lend_memory = directory.kvstore()["driver"] != "memory"

    def write(self, key: str, box: Box, array: np.ndarray) -> None:
        """Starts to write one cell, clipped at the array's edge; `array` must not change until `finish`.

        Waits while the budget is used up. After a failure nothing is written any more; `finish` raises it.
        Raises ValueError: a box that is not one cell (it would read what is there, and two ranks could lose an
        update), an array of another shape or type.
        """
        store, chunks = self._arrays[key]
        _check_array(key, box, chunks, array)
        index, cell = next(cells(chunks.shape, chunks.cell, box))
        if cell != box:
            raise ValueError(
                f"array {key!r}: {box} is not one cell of {chunks.shape} cut into {chunks.cell}"
            )

        def start() -> ts.Future[None]:
            target = store[slices(box)]
            return target.write(
                array, can_reference_source_data_indefinitely=self._lend_memory
            ).commit

        self._operations.start(f"{key}/{cell_name(index)}", array.nbytes, start, array)

    def finish(self) -> None:
        """Waits for all. Raises OSError: the first cell that could not be written."""
        if failure := self._operations.finish():
            name, error = failure
            raise OSError(f"{self._url}: the cell {name} was not written: {error}") from error


class Reader:
    """Reads boxes of arrays straight into the caller's memory. What is read is checked.

    Raises ValueError: metadata that is not this format's.
    """

    def __init__(
        self, directory: Store, metadata: Mapping[str, Json], *, budget_bytes: int = 64 << 20
    ) -> None:
        self._arrays = _OpenArrays(directory, metadata, write=False)
        self._operations = _Operations(budget_bytes)
        self._url = directory.url
        store = directory.kvstore()
        self._local_path: str = store["path"] if store["driver"] == "file" else ""

    def read(self, key: str, box: Box, into: np.ndarray) -> None:
        """Starts to read `box` into an array of its shape, with any strides. Waits while the budget is used up.

        After a failure nothing is read any more; `finish` raises it.
        Raises ValueError: a box outside of the array, memory of another shape or type.
        """
        store, chunks = self._arrays[key]
        _check_array(key, box, chunks, into)
        for index, cell in cells(chunks.shape, chunks.cell, box):
            overlap = intersect(cell, box)
            if overlap is None:
                continue
            # the dots: a view even of an array without dims
            inside: Any = (*slices(relative(overlap, box)), ...)
            target = into[inside]
            name = f"{key}/{cell_name(index)}"

            # defaults bind the loop's values: an operation may start while later ones are being made
            def start(
                overlap: Box = overlap, target: np.ndarray = target, name: str = name
            ) -> ts.Future[None]:
                # here and not before the loop: a file is checked right before it is read
                if self._local_path:
                    _check_file(self._local_path + name, chunks)
                destination = ts.array(target, copy=False, write=True)
                return destination.write(store[slices(overlap)]).commit

            self._operations.start(name, _bytes_to_read(overlap, chunks), start, target)

    def finish(self) -> None:
        """Waits for all. Raises ValueError: the first cell that is missing or damaged."""
        if failure := self._operations.finish():
            name, error = failure
            raise ValueError(
                f"{self._url}: array {name.rpartition('/')[0]!r}: the cell {name} cannot be read: {error}; "
                "`python -m core.dist_checkpointing verify` lists all damage; load an older step"
            ) from error


class _OpenArrays:
    """The arrays of one checkpoint, each opened once."""

    def __init__(
        self, directory: Store, metadata: Mapping[str, Json], *, write: bool, durable: bool = True
    ) -> None:
        # tensorstore believes what it is given: sizes and codecs are checked here
        for key, node in metadata.items():
            check_metadata(key, node)
        self._directory = directory
        self._metadata = metadata
        self._write = write
        self._durable = durable
        self._opened: dict[str, tuple[ts.TensorStore, Chunking]] = {}

    def __getitem__(self, key: str) -> tuple[ts.TensorStore, Chunking]:
        if key not in self._opened:
            if key not in self._metadata:
                raise ValueError(f"{self._directory.url}: no array {key!r}")
            self._opened[key] = self._open(key), Chunking.from_metadata(self._metadata[key])
        return self._opened[key]

    def _open(self, key: str) -> ts.TensorStore:
        kvstore = self._directory.kvstore(key + "/")
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
        context = self._directory.context or CONTEXT
        return ts.open(
            spec,
            context=context,
            read=not self._write,
            write=self._write,
            open=True,
            assume_metadata=True,
        ).result()


class _Operations:
    """Operations that have been started, first in, first out, and the first failure of any."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._pending_bytes = 0
        self._pending: deque[tuple[str, int, ts.Future[None], np.ndarray]] = deque()
        self._failure: tuple[str, Exception] | None = None

    def start(
        self, name: str, size: int, operation: Callable[[], ts.Future[None]], array: np.ndarray
    ) -> None:
        """Starts an operation on `array`, which is kept alive; one larger than the budget runs alone."""
        # the oldest first: it is the most likely to be done
        while self._pending and self._pending_bytes + size > self._budget:
            self._wait_for_first()
        if self._failure is None:
            try:
                self._pending.append((name, size, operation(), array))
            except (OSError, ValueError) as error:
                self._failure = (name, error)
            else:
                self._pending_bytes += size

    def finish(self) -> tuple[str, Exception] | None:
        """Waits for all: after it nothing touches the memory of any operation. Returns the first failure."""
        while self._pending:
            self._wait_for_first()
        return self._failure

    def _wait_for_first(self) -> None:
        name, size, future, _ = self._pending[0]
        try:
            future.result()  # interrupted, it still is pending
        except Exception as error:
            # tensorstore has no type of its own
            self._failure = self._failure or (name, error)
        self._pending.popleft()
        self._pending_bytes -= size


def _check_array(key: str, box: Box, chunks: Chunking, array: np.ndarray) -> None:
    if len(box) != len(chunks.shape) or intersect(box, whole(chunks.shape)) != box:
        raise ValueError(f"array {key!r}: {box} is not inside its shape {chunks.shape}")
    if array.shape != extent(box) or array.dtype != np.dtype(chunks.data_type):
        expected = f"{chunks.data_type} of shape {extent(box)}"
        raise ValueError(
            f"array {key!r}: {expected} expected for {box}, got {array.dtype} of shape {array.shape}"
        )


def _check_file(path: str, chunks: Chunking) -> None:
    """tensorstore would wait for a FIFO, and end the process where it has no memory for a full file."""
    status = os.stat(path)
    check_regular(path, status)
    if status.st_size > chunks.max_file_bytes:
        raise ValueError(
            f"{path} has {status.st_size} bytes, a cell of this array at most {chunks.max_file_bytes}"
        )


def _bytes_to_read(box: Box, chunks: Chunking) -> int:
    """What is decoded for a box: every unit, which shares one checksum, that it touches."""
    lengths = []
    for (start, stop), unit in zip(box, chunks.unit, strict=True):
        lengths.append(-(-stop // unit) * unit - start // unit * unit)
    return prod(lengths) * ITEMSIZE[chunks.data_type]
