"""`reshard`: does another layout read what it needs, and if not, a copy whose cells are cut for it.

Any layout can load any checkpoint. A copy only saves reading: where a rank's shard ends inside of an inner chunk, two
ranks read that chunk.
"""

import time
from collections.abc import Callable, Iterator, Mapping

from core.dist_checkpointing.format.arrays import Index
from core.dist_checkpointing.format.grid import cell_shape, cells, inner_shape
from core.dist_checkpointing.format.zarr_metadata import Chunking, Json, array_metadata
from core.dist_checkpointing.planning.cuts import read_amplification
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.reading.stream import stream
from core.dist_checkpointing.tools.offline import write_offline
from core.dist_checkpointing.writing.job import Cells
from core.parallel_state.flat import Box

# bytes read over bytes needed, up to which a copy is not worth its time
GOOD_AMPLIFICATION = 1.05

# called with the number of bytes that were written
Done = Callable[[int], None]


def cut_for(stored: StoredCheckpoint, tp: int) -> dict[str, Json]:
    """key -> `zarr.json` of every array in cells that suit a tensor-parallel size."""
    metadata = {}
    for key in stored.keys:
        info = stored.info(key)
        # the grid of a save, where it suits
        tp_sizes = 8 if 8 % tp == 0 else tp
        cell = cell_shape(
            info.shape, info.tp_dim, stacked=info.stacked, ragged=info.ragged, tp_sizes=tp_sizes
        )
        attributes = stored.metadata[key]["attributes"]
        metadata[key] = array_metadata(info, cell, inner_shape(cell), attributes)
    return metadata


def amplification(
    stored: StoredCheckpoint, metadata: Mapping[str, Json], tp: int, pp: int
) -> float:
    """Bytes read over bytes needed by all ranks of a layout, if the arrays were cut as `metadata` says."""
    arrays = [(stored.info(key), Chunking.from_metadata(metadata[key]).unit) for key in stored.keys]
    return read_amplification(arrays, tp, pp)


def copy(
    stored: StoredCheckpoint, url: str, metadata: Mapping[str, Json], run: Json, done: Done
) -> None:
    """A checkpoint at `url` with the same values in the cells of `metadata`, committed and then checked.

    Memory stays bounded whatever the size. Raises ValueError: a file of either that is not what it should be.
    """
    attributes = {
        "paracore": {"format": stored.format, "objects": stored.objects, "derived": stored.derived}
    }
    new_run = {**stored.run, "time": time.time(), **run}
    nbytes = sum(map(stored.nbytes, stored.keys))
    write_offline(url, metadata, attributes, new_run, nbytes, _copied_cells(stored, metadata, done))


def _copied_cells(stored: StoredCheckpoint, metadata: Mapping[str, Json], done: Done) -> Cells:
    # run through twice, so a function: once for what is to be read, once for what is written
    def new_cells() -> Iterator[tuple[str, Index, Box]]:
        for key in stored.keys:
            new_cell = Chunking.from_metadata(metadata[key]).cell
            for index, box in cells(stored.shape(key), new_cell):
                yield key, index, box

    arrays = stream(stored, ((key, box) for key, _, box in new_cells()))
    for (key, index, box), array in zip(new_cells(), arrays, strict=True):
        yield key, index, box, array
        done(array.nbytes)
