"""Boxes of a checkpoint's arrays one after the other: the next ones are read while one is used. No torch."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

import numpy as np

from core.dist_checkpointing.format.arrays import ITEMSIZE, Index
from core.dist_checkpointing.format.grid import cells
from core.dist_checkpointing.reading.direct import DirectReader, fastest_reader
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.storage.zarr_store import Reader
from core.parallel_state.flat import Box, extent, volume

# bytes: where an array begins in memory that is used again
ALIGN = 64
BATCH_BYTES = 8 << 20  # read at a time, while as many are used
# bytes in flight, of a reader that has a budget; a batch that is larger is not read ahead
BUDGET = 64 << 20

AnyReader = Reader | DirectReader
# key of an array, box of it
BoxRequests = Iterable[tuple[str, Box]]


class _Memory:
    """Memory of one batch, used again for the next: pages of new memory cost more than what is read into them."""

    def __init__(self, *, again: bool) -> None:
        self._again = again
        self._bytes = np.empty(0, np.uint8)

    def arrays(self, shapes: Sequence[tuple[Box, str]]) -> deque[np.ndarray]:
        """One array for each box and stored dtype; of an earlier call's nothing is kept."""
        sizes = [-(-volume(box) * ITEMSIZE[dtype] // ALIGN) * ALIGN for box, dtype in shapes]
        if not self._again or sum(sizes) > BUDGET:
            self._bytes = np.empty(0, np.uint8)
            return deque(np.empty(extent(box), dtype) for box, dtype in shapes)
        if self._bytes.size < sum(sizes):
            self._bytes = np.empty(sum(sizes), np.uint8)
        arrays: deque[np.ndarray] = deque()
        start = 0
        for (box, dtype), size in zip(shapes, sizes, strict=True):
            used = self._bytes[start : start + volume(box) * ITEMSIZE[dtype]]
            arrays.append(used.view(dtype).reshape(extent(box)))
            start += size
        return arrays


def stream(
    stored: StoredCheckpoint, requests: BoxRequests, *, reuse_memory: bool = False
) -> Iterator[np.ndarray]:
    """The stored values of each box, in order.

    Every file touched must be the one that the manifest names: that is known at the end, so exhaust the iterator.
    reuse_memory: an array holds its values until the next one is asked for.
    Raises ValueError: what is missing or damaged, by file.
    """
    # two readers take turns: one prefetches the next batch while the arrays of the other are used
    files = stored.manifest.files
    first, second = (
        fastest_reader(stored.directory, stored.metadata, files, budget_bytes=BUDGET)
        for _ in range(2)
    )
    turns = cycle([(first, _Memory(again=reuse_memory)), (second, _Memory(again=reuse_memory))])
    previous: tuple[AnyReader, deque[np.ndarray]] | None = None
    checked: set[tuple[str, Index]] = set()
    # the direct reader checks files while it reads them; tensorstore's does not see the bytes that tell
    with stored.checker(enabled=isinstance(first, Reader)) as checker:
        for (reader, memory), batch in zip(turns, _batches(stored, requests), strict=False):
            if (
                previous is not None
                and sum(_nbytes(stored, key, box) for key, box in batch) > BUDGET
            ):
                # so that memory holds one large array, not two
                yield from _finished(*previous)
                previous = None
            arrays = memory.arrays([(box, stored.metadata[key]["data_type"]) for key, box in batch])
            for (key, box), array in zip(batch, arrays, strict=True):
                # boxes may share cells: each file is checked once
                for index, _ in cells(stored.shape(key), stored.cell(key), box):
                    if (key, index) not in checked:
                        checked.add((key, index))
                        checker.add(key, index)
                reader.read(key, box, array)
            del array
            if previous is not None:
                yield from _finished(*previous)
            previous = reader, arrays
        if previous is not None:
            yield from _finished(*previous)


def _finished(reader: AnyReader, arrays: deque[np.ndarray]) -> Iterator[np.ndarray]:
    """The arrays of a batch once they are read; each is freed as soon as the caller has used it."""
    reader.finish()
    while arrays:
        yield arrays.popleft()


def _batches(stored: StoredCheckpoint, requests: BoxRequests) -> Iterator[list[tuple[str, Box]]]:
    batch = []
    size = 0
    for key, box in requests:
        batch.append((key, box))
        size += _nbytes(stored, key, box)
        if size >= BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _nbytes(stored: StoredCheckpoint, key: str, box: Box) -> int:
    return volume(box) * ITEMSIZE[stored.metadata[key]["data_type"]]
