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

BATCH = 8 << 20  # bytes read at a time, while as many are used

Wanted = Iterable[tuple[str, Box]]  # key of an array, box of it


def stream(stored: StoredCheckpoint, wanted: Wanted) -> Iterator[np.ndarray]:
    """The stored values of each box, in order.

    Every file touched must be the one that the manifest names: it is known at the end, so take all.
    Raises ValueError: what is missing or damaged, by file.
    """
    readers = cycle([Reader(stored.directory, stored.metadata), Reader(stored.directory, stored.metadata)])
    reading: tuple[Reader, deque[np.ndarray]] | None = None
    checked: set[tuple[str, Index]] = set()
    with stored.checker() as checker:
        for reader, batch in zip(readers, _batches(stored, wanted), strict=False):
            arrays: deque[np.ndarray] = deque()
            for key, box in batch:
                for index, _ in cells(stored.shape(key), stored.cell(key), box):
                    if (key, index) not in checked:
                        checked.add((key, index))
                        checker.add(key, index)
                arrays.append(np.empty(extent(box), stored.metadata[key]["data_type"]))
                reader.read(key, box, arrays[-1])
            if reading is not None:
                yield from _taken(*reading)
            reading = reader, arrays
        if reading is not None:
            yield from _taken(*reading)


def _taken(reader: Reader, arrays: deque[np.ndarray]) -> Iterator[np.ndarray]:
    reader.finish()
    while arrays:
        yield arrays.popleft()


def _batches(stored: StoredCheckpoint, wanted: Wanted) -> Iterator[list[tuple[str, Box]]]:
    batch, size = [], 0
    for key, box in wanted:
        batch.append((key, box))
        size += volume(box) * ITEMSIZE[stored.metadata[key]["data_type"]]
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
