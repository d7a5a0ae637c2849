"""A checkpoint written by one process, without ranks: the copies of `reshard`, what `import` makes."""

from collections.abc import Mapping
from contextlib import suppress
from uuid import uuid4

from core.dist_checkpointing.format.zarr_metadata import Json
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.publish.manifest import MANIFEST
from core.dist_checkpointing.storage.address import root_and_name
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from core.dist_checkpointing.writing.job import Cells, Job

BUDGET = 32 << 20  # bytes on their way to disk


def check_new(url: str) -> None:
    """Raises ValueError: there is a checkpoint already, which a save would replace."""
    if open_checkpoint_dir(url).size(MANIFEST) is not None:
        raise ValueError(f"{url} is a checkpoint already; give a directory that is to be made")


def write_offline(
    url: str, metadata: Mapping[str, Json], attributes: Json, run: Json, nbytes: int, cells: Cells
) -> None:
    """A checkpoint at `url` of these cells, committed and then checked; after an error or interrupt nothing remains.

    Raises ValueError: something is there; a file that is not what it should be.
    """
    check_new(url)
    # the same job as of a rank in training: rank 0 of 1
    root, name = root_and_name(url)
    job = Job(
        root=root,
        name=name,
        uuid=uuid4().hex,
        rank=0,
        world_size=1,
        metadata=metadata,
        attributes=attributes,
        run=run,
        nbytes=nbytes,
        budget_bytes=BUDGET,
    )
    try:
        job.begin()
        job.write(cells)
        job.conclude()
    except BaseException:
        # the first error is the one to be raised
        with suppress(OSError, ValueError):
            job.abandon()
        raise
    # every file was just written, so its digest is cheap to check, and a copy is made to be relied on
    if problems := check(open_checkpoint_dir(url), digests=True):
        raise ValueError("; ".join(problems[:10]))
