"""The manifest: the proof that a checkpoint is whole, and what every reader starts from. Pure."""

from collections.abc import Mapping
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
SIGNATURE = "signature.json"  # who wrote it, where somebody signed it; in no manifest
SIGNED = "paracore checkpoint, sha256 of its files, ed25519"  # what it says it is
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


def read_manifest(place: CheckpointDir) -> Manifest:
    """Raises ValueError naming the file: missing, damaged, of a newer format, or with paths that lead elsewhere."""
    file = place.url + MANIFEST
    try:
        value = unseal(place.read(MANIFEST), file)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: no checkpoint, or an unfinished one; use another step") from None
    number = value.get("format")
    if not isinstance(number, int) or number > FORMAT:
        raise ValueError(f"{file}: format {number}, this version reads up to {FORMAT}; update paracore")
    files, run = value.get("files"), value.get("run")
    if not isinstance(files, dict) or not isinstance(run, dict) or not isinstance(value.get("uuid"), str):
        raise ValueError(f"{file}: one of `files`, `run`, `uuid` is missing or of a wrong type; use another step")
    if bad := sorted(path for path in files if leads_elsewhere(path)):
        raise ValueError(f"{file}: {len(bad)} of its paths lead out of the checkpoint, {bad[0]!r}; do not trust it")
    if bad := sorted(path for path in files if not path.isprintable()):
        raise ValueError(f"{file}: {len(bad)} of its paths hold control characters, {bad[0]!r}; do not trust it")
    if bad := sorted(path for path, entry in files.items() if not is_entry(entry)):
        raise ValueError(f"{file}: {files[bad[0]]!r} of {bad[0]} is no [size, crc]; use another step")
    return Manifest(value["uuid"], {path: (size, crc) for path, (size, crc) in files.items()}, run)


def leads_elsewhere(path: str) -> bool:
    """Whether a relative path could name a file outside, on any system."""
    return "\\" in path or "\0" in path or ":" in path or any(part in ("", ".", "..") for part in path.split("/"))


def is_entry(entry: Any) -> bool:
    """Whether a value of `files` is [size, crc]."""
    return isinstance(entry, list) and len(entry) == 2 and all(type(n) is int and n >= 0 for n in entry)


def planned_files(metadata: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Every file that the groups and arrays (path -> zarr.json) are made of."""
    files = set()
    for path, node in metadata.items():
        prefix = f"{path}/" if path else ""
        files.add(f"{prefix}zarr.json")
        if node["node_type"] == "array":
            files.update(prefix + cell_name(index) for index in product(*map(range, grid_shape(node))))
    return files


def min_manifest_bytes(metadata: Mapping[str, Mapping[str, Any]]) -> int:
    """What a manifest has at least that lists the cells of these arrays, without naming them."""
    short = {key: f'"{key}/{cell_name((0,) * len(node["shape"]))}":[9,9],' for key, node in metadata.items()}
    return sum(prod(grid_shape(node)) * len(short[key]) for key, node in metadata.items())


def grid_shape(array: Mapping[str, Any]) -> list[int]:
    """How many cells an array has along each dim, by its zarr.json."""
    cell = array["chunk_grid"]["configuration"]["chunk_shape"]
    return [-(-n // c) for n, c in zip(array["shape"], cell, strict=True)]
