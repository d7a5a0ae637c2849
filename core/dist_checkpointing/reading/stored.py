"""A committed checkpoint, opened: what is in it, and whether each file is the one that was saved. No torch."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from core.dist_checkpointing.format.arrays import ArrayInfo, Index
from core.dist_checkpointing.format.contents import Contents
from core.dist_checkpointing.format.digest import json_crc
from core.dist_checkpointing.format.grid import cell_name
from core.dist_checkpointing.format.json_files import parse_json
from core.dist_checkpointing.format.zarr_metadata import Json, info_of
from core.dist_checkpointing.publish.check import check_before_reading, crc_of
from core.dist_checkpointing.publish.manifest import MANIFEST, Manifest, read_manifest
from core.dist_checkpointing.storage.checkpoint_dir import (
    CheckpointDir,
    PosixCheckpointDir,
    open_checkpoint_dir,
)

DCP_METADATA = ".metadata"  # of torch.distributed.checkpoint


@dataclass(frozen=True)
class StoredCheckpoint:
    """What is known of a checkpoint before any tensor is read.

    directory: its files. manifest: path -> size and crc, who wrote it. metadata: key -> `zarr.json` of every array.
    objects: key -> value. derived: key -> how to get an array that is not stored. format: of the root group.
    """

    directory: CheckpointDir
    manifest: Manifest
    metadata: Mapping[str, Json]
    objects: Mapping[str, Any]
    derived: Mapping[str, Mapping[str, str]]
    format: int

    @classmethod
    def open(cls, url: str | Path, *, sizes: bool = False) -> "StoredCheckpoint":
        """Reads two files, whose checksums must hold; `sizes`: every other file must be there in its size.

        Raises FileNotFoundError: no checkpoint there. ValueError: damaged (the file is named), a newer format, or
        metadata that no checkpoint of ours has.
        """
        directory = open_checkpoint_dir(url)
        if directory.size(MANIFEST) is None:
            raise FileNotFoundError(_no_checkpoint(directory))
        if sizes and (problems := check_before_reading(directory)):
            raise ValueError("\n".join(problems[:10]))
        # the manifest vouches for the root's zarr.json, and that for all other metadata
        manifest = read_manifest(directory)
        root_file = f"{directory.url}zarr.json"
        data = directory.read("zarr.json")
        _, expected_crc = manifest.files.get("zarr.json", (0, -1))
        if json_crc(data) != expected_crc:
            raise ValueError(f"{root_file} is not the file that was saved; use another step")
        root = parse_json(data, root_file)
        try:
            contents = Contents.from_root(root, manifest.files)
        except ValueError as error:
            raise ValueError(f"{root_file}: {error}") from None
        return cls(
            directory,
            manifest,
            contents.metadata,
            contents.objects,
            contents.derived,
            contents.format,
        )

    @property
    def run(self) -> Mapping[str, Any]:
        """Who wrote it: layout, time, version."""
        return self.manifest.run

    def shape(self, key: str) -> tuple[int, ...]:
        """The global shape of an array."""
        return tuple(self.metadata[key]["shape"])

    def cell(self, key: str) -> tuple[int, ...]:
        """The shape of an array's cells."""
        return tuple(self.metadata[key]["chunk_grid"]["configuration"]["chunk_shape"])

    def dtype(self, key: str) -> str:
        """torch's name of an array's dtype."""
        node = self.metadata[key]
        return str(node.get("attributes", {}).get("torch_dtype", node["data_type"]))

    def info(self, key: str) -> ArrayInfo:
        """Shape, dtype and grid of an array."""
        return info_of(self.metadata[key])

    def nbytes(self, key: str) -> int:
        """Bytes of an array's values."""
        return prod(self.shape(key)) * ArrayInfo((), self.dtype(key)).itemsize

    @cached_property
    def keys(self) -> list[str]:
        """The keys of all arrays, sorted."""
        return sorted(self.metadata)

    def dtype_differs(
        self, key: str, stored_key: str, info: ArrayInfo, *, cast: bool
    ) -> str | None:
        """Why values of the array `stored_key` cannot be those of `key` in `info`; None if they can."""
        derived_dtype = self.derived.get(key, {}).get("torch_dtype")
        stored_dtype = self.dtype(stored_key)
        both_floating = "float" in stored_dtype and "float" in info.dtype
        if info.dtype in (stored_dtype, derived_dtype) or (cast and both_floating):
            return None
        # a main weight that is read from its weight, in a run that had no main weights beside
        if stored_key != key and info.dtype == "float32":
            return None
        if both_floating:
            remedy = "give cast=True to convert"
        else:
            remedy = "only floating dtypes are converted"
        return f"it is {stored_dtype} in the checkpoint and {info.dtype} here; {remedy}"

    @contextmanager
    def checker(self, *, enabled: bool = True) -> Iterator["CellChecker"]:
        """Checks the cells added to it beside other work; at the end raises ValueError naming the first bad one."""
        with ThreadPoolExecutor(4, thread_name_prefix="checkpoint-check") as pool:
            checker = CellChecker(self, pool if enabled else None)
            yield checker
            checker.finish()


def _no_checkpoint(directory: CheckpointDir) -> str:
    """What lies there instead."""
    place = directory.url.removesuffix("/")
    if directory.size(DCP_METADATA) is not None:
        return (
            f"{place} is no checkpoint of ours yet: {DCP_METADATA} says that torch.distributed.checkpoint wrote it; "
            f"python -m core.dist_checkpointing import {place} NEW_DIRECTORY makes one, which load reads"
        )
    if isinstance(directory, PosixCheckpointDir) and not os.path.isdir(place):
        if not os.path.exists(place):
            return f"{place} does not exist; give a step's own directory"
        return (
            f"{place} is a file, and checkpoints are directories; what torch's own save wrote its own load reads: "
            "then dist_checkpointing.save({'model': model.state_dict()}, DIRECTORY) makes a checkpoint of it"
        )
    return f"{directory.url} is no checkpoint: it has no {MANIFEST}; give a step's own directory"


class CellChecker:
    """Checks cells against the sizes and digests of the manifest; made by `StoredCheckpoint.checker`."""

    def __init__(self, stored: StoredCheckpoint, pool: ThreadPoolExecutor | None) -> None:
        self._stored = stored
        self._pool = pool
        self._running: list[Future[None]] = []

    def add(self, key: str, index: Index) -> None:
        """Check one more cell of an array, in a thread of the pool."""
        if self._pool is not None:
            self._running.append(self._pool.submit(self._check, key, index))

    def _check(self, key: str, index: Index) -> None:
        name = f"{key}/{cell_name(index)}"
        stored = self._stored
        url = f"{stored.directory.url}{name}"
        expected = stored.manifest.files.get(name)
        if expected is None:
            raise ValueError(f"{url} is not in the manifest; use another step")
        try:
            size_and_crc = crc_of(stored.directory, name, stored.metadata[key], size=expected[0])
        except FileNotFoundError as error:
            raise ValueError(f"{url} is missing; use another step") from error
        except OSError as error:
            raise ValueError(f"{url} cannot be read ({error}); use another step") from error
        if size_and_crc != expected:
            raise ValueError(
                f"{url} is not the cell that was saved there: size and digest are {size_and_crc}, the "
                f"manifest says {expected}; use another step"
            )

    def finish(self) -> None:
        """Wait until all cells that were added are checked."""
        for future in self._running:
            future.result()
