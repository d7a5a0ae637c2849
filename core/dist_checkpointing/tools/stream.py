"""Boxes of a checkpoint's arrays one after the other: the next ones are read while one is used. No torch."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import cycle

import numpy as np

from core.dist_checkpointing.format.arrays import ITEMSIZE, Index
from core.dist_checkpointing.format.grid import cells
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.storage.zarr_store import Reader
from core.parallel_state.flat import Box, extent, volume

BATCH_BYTES = 8 << 20  # read at a time, while as many are used

BoxRequests = Iterable[tuple[str, Box]]  # key of an array, box of it


def stream(stored: StoredCheckpoint, requests: BoxRequests) -> Iterator[np.ndarray]:
    """The stored values of each box, in order.

    Every file touched must be the one that the manifest names: that is known at the end, so exhaust the iterator.
    Raises ValueError: what is missing or damaged, by file.
    """
    # two readers take turns: one prefetches the next batch while the arrays of the other are used
    readers = cycle([Reader(stored.directory, stored.metadata), Reader(stored.directory, stored.metadata)])
    previous: tuple[Reader, deque[np.ndarray]] | None = None
    checked: set[tuple[str, Index]] = set()
    with stored.checker() as checker:
        for reader, batch in zip(readers, _batches(stored, requests), strict=False):
            arrays: deque[np.ndarray] = deque()
            for key, box in batch:
                # boxes may share cells: each file is checked once
                for index, _ in cells(stored.shape(key), stored.cell(key), box):
                    if (key, index) not in checked:
                        checked.add((key, index))
                        checker.add(key, index)
                arrays.append(np.empty(extent(box), stored.metadata[key]["data_type"]))
                reader.read(key, box, arrays[-1])
            if previous is not None:
                yield from _finished(*previous)
            previous = reader, arrays
        if previous is not None:
            yield from _finished(*previous)


def _finished(reader: Reader, arrays: deque[np.ndarray]) -> Iterator[np.ndarray]:
    """The arrays of a batch once they are read; each is freed as soon as the caller has used it."""
    reader.finish()
    while arrays:
        yield arrays.popleft()


def _batches(stored: StoredCheckpoint, requests: BoxRequests) -> Iterator[list[tuple[str, Box]]]:
    batch, size = [], 0
    for key, box in requests:
        batch.append((key, box))
        size += volume(box) * ITEMSIZE[stored.metadata[key]["data_type"]]
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
