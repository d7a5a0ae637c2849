"""`reshard`: does another layout read what it needs, and if not, a copy whose cells are cut for it.

Any layout can load any checkpoint. A copy only saves reading: where a rank's part ends inside of a cell's piece, the
piece is read by two ranks.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from uuid import uuid4

from core.dist_checkpointing.address import root_and_name
from core.dist_checkpointing.check import check
from core.dist_checkpointing.cuts import read_amplification
from core.dist_checkpointing.grid import cell_shape, cells, inner_shape
from core.dist_checkpointing.job import Cells, Job
from core.dist_checkpointing.manifest import MANIFEST
from core.dist_checkpointing.place import open_place
from core.dist_checkpointing.stored import Stored
from core.dist_checkpointing.stream import stream
from core.dist_checkpointing.zarr_metadata import Chunks, Json, array_metadata

WELL = 1.05  # bytes read over bytes needed, up to which a copy is not worth its time
BUDGET = 32 << 20  # bytes on their way to disk

Done = Callable[[int], None]  # told of bytes


def cut_for(stored: Stored, tp: int) -> dict[str, Json]:
    """key -> `zarr.json` of every array in cells that suit a tensor-parallel size."""
    found = {}
    for key in stored.keys:
        info = stored.info(key)
        parts = 8 if 8 % tp == 0 else tp
        cell = cell_shape(info.shape, info.tp_dim, stacked=info.stacked, ragged=info.ragged, parts=parts)
        found[key] = array_metadata(info, cell, inner_shape(cell), stored.metadata[key]["attributes"])
    return found


def amplification(stored: Stored, metadata: Mapping[str, Json], tp: int, pp: int) -> float:
    """Bytes read over bytes needed by all ranks of a layout, if the arrays were cut as `metadata` says."""
    return read_amplification(((stored.info(key), Chunks.of(metadata[key]).unit) for key in stored.keys), tp, pp)


def copy(stored: Stored, url: str, metadata: Mapping[str, Json], run: Json, done: Done) -> None:
    """A checkpoint at `url` with the same values in the cells of `metadata`, committed and then checked.

    Memory stays bounded whatever the size. Raises ValueError: a file of either that is not what it should be.
    """
    if open_place(url).size(MANIFEST) is not None:
        raise ValueError(f"{url} is a checkpoint already; give a directory that is to be made")
    root, name = root_and_name(url)
    job = Job(
        root=root,
        name=name,
        uuid=uuid4().hex,
        rank=0,
        world_size=1,
        metadata=metadata,
        attributes={"paracore": {"format": stored.format, "objects": stored.objects, "derived": stored.derived}},
        run={**stored.run, "time": time.time(), **run},
        nbytes=sum(map(stored.nbytes, stored.keys)),
        budget_bytes=BUDGET,
    )
    try:
        job.begin()
        job.write(_cells(stored, metadata, done))
        job.conclude()
    except BaseException:
        with suppress(OSError, ValueError):  # what went wrong is what is told
            job.abandon()
        raise
    if problems := check(open_place(url), digests=True):
        raise ValueError("; ".join(problems[:10]))


def _cells(stored: Stored, metadata: Mapping[str, Json], done: Done) -> Cells:
    def wanted() -> Iterator[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]]:
        for key in stored.keys:
            for index, box in cells(stored.shape(key), Chunks.of(metadata[key]).cell):
                yield key, index, box

    arrays = stream(stored, ((key, box) for key, _, box in wanted()))
    for (key, index, box), array in zip(wanted(), arrays, strict=True):
        yield key, index, box, array
        done(array.nbytes)
