"""One rank's share of one save, as plain values: done by the trainer at once, or handed to the writer program."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from core.dist_checkpointing.format.arrays import Index
from core.dist_checkpointing.format.contents import files_of
from core.dist_checkpointing.format.digest import json_crc
from core.dist_checkpointing.format.grid import cell_name
from core.dist_checkpointing.format.json_files import canonical_json
from core.dist_checkpointing.format.zarr_metadata import Json, group_metadata
from core.dist_checkpointing.publish.check import crc_of
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.commit import (
    commit,
    merge_receipts,
    receipts_folder,
    write_failure,
    write_receipt,
)
from core.dist_checkpointing.publish.manifest import min_manifest_bytes, planned_files
from core.dist_checkpointing.storage.checkpoint_dir import CheckpointDir, space_for
from core.dist_checkpointing.storage.fs import MAX_JSON_BYTES
from core.dist_checkpointing.storage.zarr_store import Writer
from core.dist_checkpointing.writing.direct_write import DirectWriter, fastest_writer
from core.parallel_state.flat import Box

log = logging.getLogger(__name__)

Cells = Iterable[tuple[str, Index, Box, np.ndarray]]
Entries = dict[str, tuple[int, int]]  # path -> (size, crc)
# bytes beside the arrays: metadata, receipts, the manifest
SLACK = 1 << 20


@dataclass(frozen=True)
class Job:
    """What one rank does in one save; plain values, so that they can be sent to another process.

    root, name, uuid: which attempt at which checkpoint. metadata: key -> `zarr.json` of every array. attributes: of
    the root group. run: for the manifest. retention: which steps stay after the commit, the arguments of `Retention`;
    None: all. nbytes: of the full checkpoint. budget_bytes: on their way to disk at a time.
    """

    root: str
    name: str
    uuid: str
    rank: int
    world_size: int
    metadata: Mapping[str, Json]
    attributes: Mapping[str, Any]
    run: Mapping[str, Any]
    nbytes: int
    timeout_s: float = 600.0
    retention: Mapping[str, Any] | None = None
    durable: bool = True
    budget_bytes: int = 192 << 20

    @cached_property
    def _root(self) -> CheckpointRoot:
        return CheckpointRoot(self.root)

    @property
    def _directory(self) -> CheckpointDir:
        """Where this attempt's files are written before the commit."""
        return self._root.temporary(self.name, self.uuid)

    def begin(self) -> None:
        """Rank 0, before the others write much: the temporary directory, once what killed jobs left is gone.

        Raises DiskFullError: too little space. ValueError: more cells than a reader takes in one manifest.
        """
        manifest_bytes = min_manifest_bytes(self.metadata)
        if manifest_bytes > MAX_JSON_BYTES:
            raise ValueError(
                f"{self.name} would have a manifest of {manifest_bytes} bytes, readers take {MAX_JSON_BYTES}: save "
                "the model and each state of the optimizer as checkpoints of their own"
            )
        # first what killed jobs left: their space may be needed
        self._root.sweep(self.name)
        with space_for(self._root.files, self.nbytes + SLACK):
            self._root.begin(self.name, self.uuid)

    def write(self, cells: Cells) -> int:
        """This rank's cells and its receipt; on rank 0 also the metadata. Returns bytes of payload written.

        Exhausts `cells` also when writing fails: other ranks may take part in making them.
        """
        directory = self._directory
        writer = fastest_writer(
            directory, self.metadata, durable=self.durable, budget_bytes=self.budget_bytes
        )
        cells_written = []
        payload_bytes = 0
        disk_space = space_for(self._root.files, self.nbytes + SLACK, ahead=False)
        # the heartbeat tells other ranks, and the next job, that this one is alive
        with disk_space, ThreadPoolExecutor(1) as thread, self._root.beating(self.name, self.uuid):
            metadata_entries = None
            if self.rank == 0:
                metadata_entries = thread.submit(self._write_metadata)
            try:
                for key, index, box, array in cells:
                    writer.write(key, box, array)
                    cells_written.append((key, index))
                    payload_bytes += array.nbytes
            finally:
                # whoever makes the cells may fail: nothing writes into a temporary that is given up
                _finish(writer)
            entries: Entries = dict(writer.entries) if isinstance(writer, DirectWriter) else {}
            entries |= self._entries(cells_written, entries)
            if metadata_entries is not None:
                entries |= metadata_entries.result()
            # the receipt comes last: it says that all files in it are complete
            folder = receipts_folder(self.uuid, self.rank, self.world_size)
            write_receipt(directory, self.rank, entries, folder)
        return payload_bytes

    def _write_metadata(self) -> Entries:
        """Writes the zarr.json of every array and group."""
        nodes = {**self.metadata, **group_metadata(self.metadata, dict(self.attributes))}
        files = {file: canonical_json(nodes[path]) for file, path in files_of(nodes).items()}
        self._directory.write_all(files)
        return {name: (len(data), json_crc(data)) for name, data in files.items()}

    def _entries(self, cells_written: list[tuple[str, Index]], existing: Entries) -> Entries:
        """Path -> (size, crc) of the cells that `existing` lacks: tensorstore does not say what it wrote."""
        keys = {}
        for key, index in cells_written:
            name = f"{key}/{cell_name(index)}"
            if name not in existing:
                keys[name] = key

        def entry(name: str) -> tuple[str, tuple[int, int]]:
            return name, crc_of(self._directory, name, self.metadata[keys[name]])

        with ThreadPoolExecutor(4) as pool:
            return dict(pool.map(entry, keys))

    def merge(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Of many ranks, the first of each 64: merge their receipts into one. Rank 0 is told of failures, too."""
        try:
            merge_receipts(
                self._root,
                self.name,
                self.uuid,
                self.rank,
                self.world_size,
                self.timeout_s,
                waiting,
            )
        except (OSError, ValueError) as error:
            with suppress(OSError):
                write_failure(self._directory, self.rank, f"{type(error).__name__}: {error}")
            raise

    def conclude(self, orphaned: Callable[[], bool] = lambda: False) -> None:
        """Rank 0: commit, when every rank's receipt is there, then drop old checkpoints. Others: wait for it.

        A failure after the commit does not undo it: it is logged as a warning, and left to the next save.
        Raises RuntimeError: a rank failed; TimeoutError: one is silent. Orphaned: the job is gone, by `orphaned()`,
        and no other rank goes on.
        """
        check_others = self._root.other_ranks(self.name, self.uuid, orphaned)
        deadline = time.monotonic() + self.timeout_s
        if self.rank != 0:
            self.merge(check_others)
            remaining_s = max(0.0, deadline - time.monotonic())
            self._root.wait_for(self.name, self.uuid, remaining_s, check_others)
            return
        planned = planned_files({**self.metadata, **group_metadata(self.metadata, {})})
        # others may be slow
        with self._root.beating(self.name, self.uuid, orphaned=orphaned):
            self.merge(check_others)
            commit(
                self._root,
                self.name,
                self.uuid,
                planned,
                world_size=self.world_size,
                run=self.run,
                timeout_s=max(0.0, deadline - time.monotonic()),
                waiting=check_others,
            )
        if self.retention is not None:
            # only now: a failed save must never cost an older checkpoint
            try:
                self._root.retain(**self.retention)
            except (OSError, ValueError, RuntimeError) as error:
                log.warning("%s is saved, old checkpoints are not removed: %s", self.name, error)

    def fail(self, error: str) -> None:
        """Report to rank 0, which commits, that this rank will not finish; if it gave up, remove late files."""
        try:
            write_failure(self._directory, self.rank, error)
        except FileNotFoundError:
            self.abandon()

    def abandon(self) -> None:
        """Give this attempt up: remove its files. A rank that still writes finds no directory, see `fail`."""
        self._root.abandon(self.name, self.uuid)

    def withdraw(self) -> None:
        """After a failure or an interrupt. Rank 0: `abandon`, and finish removals that were interrupted.

        Others, before the commit: remove files that were late, or lie where rank 0 does not see them.
        """
        if self.rank == 0 or not self._root.is_begun(self.name, self.uuid):
            self.abandon()
        if self.rank == 0:
            self._root.sweep(self.name)


def _finish(writer: Writer | DirectWriter) -> None:
    """Nothing writes any more after it, not even after an interrupt."""
    try:
        writer.finish()
    except KeyboardInterrupt:
        with suppress(OSError):
            writer.finish()
        raise
