"""What the zarr.json of a checkpoint's root says is in it: nothing is believed that the manifest does not back."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from core.dist_checkpointing.format.arrays import ITEMSIZE, STORED
from core.dist_checkpointing.format.digest import json_crc
from core.dist_checkpointing.format.json_files import canonical_json
from core.dist_checkpointing.format.zarr_metadata import Json, check_metadata, check_path, difference, group_metadata
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
    def of(cls, root: Any, files: Files) -> "Contents":
        """By the root's zarr.json and the manifest's files; whoever opens a checkpoint asks this, and `verify` too.

        Raises ValueError, without the file's name: a newer format, or what no save writes.
        """
        try:
            facts = root["attributes"]["paracore"]
            below = root["consolidated_metadata"]["metadata"]
            version, objects, derived = facts["format"], facts["objects"], facts["derived"]
            metadata = {key: m for key, m in below.items() if m["node_type"] == "array"}
            sound = isinstance(objects, dict) and all(
                how["from"] in metadata and how["torch_dtype"] in STORED and key not in metadata
                for key, how in derived.items()
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no group of a checkpoint: {error!r} is missing") from None
        if type(version) is not int or version not in (FORMAT, TAGGED):
            raise ValueError(f"format {version!r}, this version reads {TAGGED}; install a newer one")
        if not sound:
            raise ValueError("objects or derived arrays that no checkpoint has; use another")
        for key in derived:
            check_path(key)
        held = Held(files)
        for key, value in metadata.items():
            check_metadata(key, value)
            held.check(key, value)
        nodes = {**metadata, **group_metadata(metadata, root["attributes"])}
        if found := difference("the group", root, nodes[""]):
            raise ValueError(f"{found}, by the arrays in it; use another")
        _check_nodes(nodes, files)
        return cls(version, metadata, objects, derived, nodes)


def _check_nodes(nodes: Mapping[str, Json], files: Files) -> None:
    """Raises ValueError: the zarr.json of an array or group, by its checksum, says something else than the root's, so
    that two readers would have two answers; or there is one that the root's does not know."""
    texts = {file: canonical_json(nodes[path]) for file, path in files_of(nodes).items() if path}
    expected = {file: (len(text), json_crc(text)) for file, text in texts.items()}
    listed = {file: entry for file, entry in files.items() if file.endswith("/zarr.json")}
    if other := sorted(file for file in expected.keys() | listed.keys() if expected.get(file) != listed.get(file)):
        why = "is not in the manifest" if other[0] not in listed else "says otherwise"
        why = why if other[0] in expected else "is of no array or group in it"
        raise ValueError(f"{other[0]} {why} ({len(other)} such files); use another step")


class Held:
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
        cells, nbytes = prod(grid_shape(node)), prod(node["shape"]) * ITEMSIZE[node["data_type"]]
        if nbytes > self._bytes[key]:
            raise ValueError(f"array {key!r} is said to have {nbytes} bytes, its files have {self._bytes[key]}")
        if cells > self._count[key]:
            raise ValueError(f"array {key!r} is said to have {cells} cells, the manifest lists {self._count[key]}")


def files_of(nodes: Iterable[str]) -> dict[str, str]:
    """zarr.json -> the path whose it is."""
    return {(f"{path}/" if path else "") + "zarr.json": path for path in nodes}
