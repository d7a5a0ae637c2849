"""One rank's share of one save, as plain values: the trainer does it at once, or hands it to the writer program."""

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
from core.dist_checkpointing.format.digest import json_crc
from core.dist_checkpointing.format.grid import cell_name
from core.dist_checkpointing.format.json_files import canonical_json
from core.dist_checkpointing.format.zarr_metadata import Json, group_metadata
from core.dist_checkpointing.publish.check import crc_of
from core.dist_checkpointing.publish.commit import (
    commit,
    merge_receipts,
    receipts_folder,
    write_failure,
    write_receipt,
)
from core.dist_checkpointing.publish.manifest import least_bytes, planned_files
from core.dist_checkpointing.publish.root import Root
from core.dist_checkpointing.storage.fs import MOST_BYTES
from core.dist_checkpointing.storage.place import Place, space_for
from core.dist_checkpointing.storage.zarr_store import Writer
from core.dist_checkpointing.writing.direct_write import DirectWriter, fastest_writer
from core.parallel_state.flat import Box

log = logging.getLogger(__name__)

Cells = Iterable[tuple[str, Index, Box, np.ndarray]]
Entries = dict[str, tuple[int, int]]  # path -> (size, crc)
SLACK = 1 << 20  # bytes beside the arrays: metadata, receipts, the manifest


@dataclass(frozen=True)
class Job:
    """root, name, uuid: which attempt at which checkpoint. metadata: key -> `zarr.json` of every array.
    attributes: of the root group. run: for the manifest. retention: what is kept after the commit, as `Retention`
    names it; None: everything. nbytes: of the whole checkpoint. budget_bytes: on their way to disk at a time."""

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
    def _root(self) -> Root:
        return Root(self.root)

    @property
    def _place(self) -> Place:
        return self._root.temporary(self.name, self.uuid)

    def begin(self) -> None:
        """Rank 0, before the others write much: the temporary directory, once what killed jobs left is gone.

        Raises DiskFullError: too little space. ValueError: more cells than a reader takes in one manifest.
        """
        if (least := least_bytes(self.metadata)) > MOST_BYTES:
            raise ValueError(
                f"{self.name} would have a manifest of {least} bytes, readers take {MOST_BYTES}: save the model and "
                "each state of the optimizer as checkpoints of their own"
            )
        self._root.sweep(self.name)
        with space_for(self._root.files, self.nbytes + SLACK):
            self._root.begin(self.name, self.uuid)

    def write(self, cells: Cells) -> int:
        """This rank's cells and its receipt; on rank 0 also the metadata. Returns bytes of payload written.

        Exhausts `cells` also when writing fails: other ranks may take part in making them.
        """
        writer = fastest_writer(self._place, self.metadata, durable=self.durable, budget_bytes=self.budget_bytes)
        written, size = [], 0
        full = space_for(self._root.files, self.nbytes + SLACK, ahead=False)
        with full, ThreadPoolExecutor(1) as aside, self._root.beating(self.name, self.uuid):
            told = aside.submit(self._write_metadata) if self.rank == 0 else None
            try:
                for key, index, box, array in cells:
                    writer.write(key, box, array)
                    written.append((key, index))
                    size += array.nbytes
            finally:  # whoever makes the cells may fail: nothing writes into a temporary that is given up
                _finish(writer)
            known = writer.entries if isinstance(writer, DirectWriter) else {}
            entries = {**known, **self._entries(written, known), **(told.result() if told is not None else {})}
            write_receipt(self._place, self.rank, entries, receipts_folder(self.uuid, self.rank, self.world_size))
        return size

    def _write_metadata(self) -> Entries:
        nodes = {**self.metadata, **group_metadata(self.metadata, dict(self.attributes))}
        files = {(f"{path}/" if path else "") + "zarr.json": canonical_json(node) for path, node in nodes.items()}
        self._place.write_all(files)
        return {name: (len(data), json_crc(data)) for name, data in files.items()}

    def _entries(self, written: list[tuple[str, Index]], known: Entries) -> Entries:
        """Of the cells whose writer does not know them."""
        names = {f"{key}/{cell_name(index)}": key for key, index in written}

        def entry(name: str) -> tuple[str, tuple[int, int]]:
            return name, crc_of(self._place, name, self.metadata[names[name]])

        with ThreadPoolExecutor(4) as pool:
            return dict(pool.map(entry, names.keys() - known.keys()))

    def merge(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Of many ranks, the first of each 64: make one of their receipts. What goes wrong is told to rank 0, too."""
        try:
            merge_receipts(self._root, self.name, self.uuid, self.rank, self.world_size, self.timeout_s, waiting)
        except (OSError, ValueError) as error:
            with suppress(OSError):
                write_failure(self._place, self.rank, f"{type(error).__name__}: {error}")
            raise

    def conclude(self, orphaned: Callable[[], bool] = lambda: False) -> None:
        """Rank 0: commit, when every rank's receipt is there, then drop old checkpoints. Others: wait for it.

        What follows the commit does not fail it: it is warned of, and left to the next save.
        Raises RuntimeError: a rank failed; TimeoutError: one is silent. Orphaned: the job is gone, which `orphaned`
        tells, and no other rank goes on.
        """
        others = self._root.others(self.name, self.uuid, orphaned)
        end = time.monotonic() + self.timeout_s
        if self.rank != 0:
            self.merge(others)
            self._root.wait_for(self.name, self.uuid, max(0.0, end - time.monotonic()), others)
            return
        groups = group_metadata(self.metadata, {})
        planned = planned_files({**self.metadata, **groups})
        with self._root.beating(self.name, self.uuid, orphaned=orphaned):  # others may be slow
            self.merge(others)
            commit(
                self._root,
                self.name,
                self.uuid,
                planned,
                world_size=self.world_size,
                run=self.run,
                timeout_s=max(0.0, end - time.monotonic()),
                waiting=others,
            )
        if self.retention is not None:
            try:
                self._root.retain(**self.retention)
            except (OSError, ValueError, RuntimeError) as error:
                log.warning("%s is saved, old checkpoints are not removed: %s", self.name, error)

    def fail(self, error: str) -> None:
        """Tell whoever commits that this rank will not be done; or, if it gave up before, remove what came late."""
        try:
            write_failure(self._place, self.rank, error)
        except FileNotFoundError:
            self.abandon()

    def abandon(self) -> None:
        """Give this attempt up: remove what is there of it. A rank that still writes finds out: `fail`."""
        self._root.abandon(self.name, self.uuid)

    def withdraw(self) -> None:
        """After a failure or an interrupt. Rank 0: `abandon`, and end what was being removed. Others, before the
        commit: remove what came late, or lies where rank 0 sees it not."""
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
