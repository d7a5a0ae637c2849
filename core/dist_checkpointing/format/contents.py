"""What a checkpoint holds, by the zarr.json of its root: nothing is believed that the manifest does not back."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from core.dist_checkpointing.format.arrays import ITEMSIZE, STORED_DTYPES
from core.dist_checkpointing.format.digest import json_crc
from core.dist_checkpointing.format.json_files import canonical_json
from core.dist_checkpointing.format.zarr_metadata import (
    Json,
    check_metadata,
    check_path,
    difference,
    group_metadata,
)
from core.dist_checkpointing.publish.manifest import FORMAT, TAGGED, Files, grid_shape


@dataclass(frozen=True)
class Contents:
    """metadata: key -> `zarr.json` of every array. objects: key -> value. derived: key -> how to get an array that is
    not stored. nodes: path -> `zarr.json` of every array and group, the root's, "", included."""

    format: int
    metadata: Mapping[str, Json]
    objects: Mapping[str, Any]
    derived: Mapping[str, Mapping[str, str]]
    nodes: Mapping[str, Json]

    @classmethod
    def from_root(cls, root: Any, files: Files) -> "Contents":
        """By the root's zarr.json and the manifest's files; used by whoever opens a checkpoint, and by `verify`.

        Raises ValueError, without the file's name: a newer format, or what no save writes.
        """
        try:
            facts = root["attributes"]["paracore"]
            all_nodes = root["consolidated_metadata"]["metadata"]
            version = facts["format"]
            objects = facts["objects"]
            derived = facts["derived"]
            metadata = {
                key: node for key, node in all_nodes.items() if node["node_type"] == "array"
            }
            sound = isinstance(objects, dict) and _is_derivable(derived, metadata)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no group of a checkpoint: {error!r} is missing") from None
        if type(version) is not int or version not in (FORMAT, TAGGED):
            raise ValueError(
                f"format {version!r}, this version reads {TAGGED}; install a newer one"
            )
        if not sound:
            raise ValueError("objects or derived arrays that no checkpoint has; use another")
        # every key becomes a path: none may lead out of the checkpoint
        for key in derived:
            check_path(key)
        listed = ListedFiles(files)
        for key, node in metadata.items():
            check_metadata(key, node)
            listed.check(key, node)
        # made again from the arrays: whatever else the root says must be what a save writes
        nodes = {**metadata, **group_metadata(metadata, root["attributes"])}
        if problem := difference("the group", root, nodes[""]):
            raise ValueError(f"{problem}, by the arrays in it; use another")
        _check_nodes(nodes, files)
        return cls(version, metadata, objects, derived, nodes)


def _is_derivable(derived: Mapping[str, Any], metadata: Mapping[str, Any]) -> bool:
    """Whether each derived array comes from a stored one, in a known dtype, and is not stored itself."""
    for key, recipe in derived.items():
        if (
            recipe["from"] not in metadata
            or recipe["torch_dtype"] not in STORED_DTYPES
            or key in metadata
        ):
            return False
    return True


def _check_nodes(nodes: Mapping[str, Json], files: Files) -> None:
    """Raises ValueError: the zarr.json of an array or group, by its checksum, says something else than the root's, so
    that two readers would have two answers; or there is one that the root's does not know."""
    expected = {}
    for file, path in files_of(nodes).items():
        if path:  # the root's own file is the one that was read
            text = canonical_json(nodes[path])
            expected[file] = len(text), json_crc(text)
    listed = {file: entry for file, entry in files.items() if file.endswith("/zarr.json")}
    # missing on one side, or another size or checksum
    unequal = sorted(
        file for file in expected.keys() | listed.keys() if expected.get(file) != listed.get(file)
    )
    if not unequal:
        return
    file = unequal[0]
    if file not in expected:
        problem = "is of no array or group in it"
    elif file not in listed:
        problem = "is not in the manifest"
    else:
        problem = "says otherwise"
    raise ValueError(f"{file} {problem} ({len(unequal)} such files); use another step")


class ListedFiles:
    """How many files, of how many bytes, the manifest lists for each array."""

    def __init__(self, files: Files) -> None:
        self._count: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        for path, (size, _) in files.items():
            folder, _, name = path.rpartition("/")
            if name != "zarr.json":
                self._count[folder] += 1
                self._bytes[folder] += size

    def check(self, key: str, node: Mapping[str, Any]) -> None:
        """Before anybody allocates it, or names its cells. Raises ValueError: an array larger than its files."""
        cell_count = prod(grid_shape(node))
        nbytes = prod(node["shape"]) * ITEMSIZE[node["data_type"]]
        if nbytes > self._bytes[key]:
            raise ValueError(
                f"array {key!r} is said to have {nbytes} bytes, its files have {self._bytes[key]}"
            )
        if cell_count > self._count[key]:
            raise ValueError(
                f"array {key!r} is said to have {cell_count} cells, the manifest lists {self._count[key]}"
            )


def files_of(nodes: Iterable[str]) -> dict[str, str]:
    """File -> node, of the paths of arrays and groups: `model/w/zarr.json` -> `model/w`; the root's is ""."""
    files = {}
    for path in nodes:
        folder = f"{path}/" if path else ""
        files[f"{folder}zarr.json"] = path
    return files
