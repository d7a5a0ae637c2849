"""The manifest: the proof that a checkpoint is complete, and what every reader starts from. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from core.dist_checkpointing.format.grid import cell_name
from core.dist_checkpointing.format.json_files import seal, unseal
from core.dist_checkpointing.storage.checkpoint_dir import CheckpointDir

FORMAT = 1
TAGGED = 2  # of the root group, where objects name types: `leaves`
MANIFEST = "manifest.json"
# who wrote it, where somebody signed it; in no manifest
SIGNATURE = "signature.json"
# the kind that a signature names
SIGNED = "paracore checkpoint, sha256 of its files, ed25519"
Files = Mapping[str, tuple[int, int]]  # path -> (size, crc)


@dataclass(frozen=True)
class Manifest:
    """Every other file of a checkpoint, and who wrote it when."""

    uuid: str
    files: Files
    run: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """The text of the file."""
        files = {path: list(entry) for path, entry in self.files.items()}
        return seal({"format": FORMAT, "uuid": self.uuid, "files": files, "run": dict(self.run)})


def read_manifest(directory: CheckpointDir) -> Manifest:
    """Raises ValueError naming the file: missing, damaged, of a newer format, or with paths that lead elsewhere."""
    file = directory.url + MANIFEST
    try:
        value = unseal(directory.read(MANIFEST), file)
    except FileNotFoundError:
        raise ValueError(
            f"{file} is missing: no checkpoint, or an unfinished one; use another step"
        ) from None
    # the format first: a newer one may have other fields
    version = value.get("format")
    if not isinstance(version, int) or version > FORMAT:
        raise ValueError(
            f"{file}: format {version}, this version reads up to {FORMAT}; update paracore"
        )
    files = value.get("files")
    run = value.get("run")
    if (
        not isinstance(files, dict)
        or not isinstance(run, dict)
        or not isinstance(value.get("uuid"), str)
    ):
        raise ValueError(
            f"{file}: one of `files`, `run`, `uuid` is missing or of a wrong type; use another step"
        )
    _check_paths(file, files)
    if bad := sorted(path for path, entry in files.items() if not is_entry(entry)):
        raise ValueError(
            f"{file}: {files[bad[0]]!r} of {bad[0]} is no [size, crc]; use another step"
        )
    return Manifest(value["uuid"], {path: (size, crc) for path, (size, crc) in files.items()}, run)


def _check_paths(file: str, paths: Iterable[str]) -> None:
    """A manifest may come from anywhere. Raises ValueError: paths that leave the checkpoint, or fool a terminal."""
    if outside := sorted(path for path in paths if leads_elsewhere(path)):
        raise ValueError(
            f"{file}: {len(outside)} of its paths lead out of the checkpoint, {outside[0]!r}; do not trust it"
        )
    if unprintable := sorted(path for path in paths if not path.isprintable()):
        raise ValueError(
            f"{file}: {len(unprintable)} of its paths hold control characters, {unprintable[0]!r}; do not trust it"
        )


def leads_elsewhere(path: str) -> bool:
    """Whether a relative path could name a file outside, on any system."""
    special = "\\" in path or "\0" in path or ":" in path
    return special or any(name in ("", ".", "..") for name in path.split("/"))


def is_entry(entry: Any) -> bool:
    """Whether a value of `files` is [size, crc]."""
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    return all(type(number) is int and number >= 0 for number in entry)


def planned_files(metadata: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Every file that the groups and arrays (path -> zarr.json) are made of."""
    files = set()
    for path, node in metadata.items():
        prefix = f"{path}/" if path else ""
        files.add(f"{prefix}zarr.json")
        if node["node_type"] == "array":
            files.update(
                prefix + cell_name(index) for index in product(*map(range, grid_shape(node)))
            )
    return files


def min_manifest_bytes(metadata: Mapping[str, Mapping[str, Any]]) -> int:
    """A lower bound for the manifest that lists the cells of these arrays, without naming them all."""
    # every cell of an array has an entry at least as long as that of its first cell
    total = 0
    for key, node in metadata.items():
        first_cell = cell_name((0,) * len(node["shape"]))
        shortest_entry = f'"{key}/{first_cell}":[9,9],'
        total += prod(grid_shape(node)) * len(shortest_entry)
    return total


def grid_shape(array: Mapping[str, Any]) -> list[int]:
    """How many cells an array has along each dim, by its zarr.json."""
    cell = array["chunk_grid"]["configuration"]["chunk_shape"]
    return [-(-size // cell_size) for size, cell_size in zip(array["shape"], cell, strict=True)]
