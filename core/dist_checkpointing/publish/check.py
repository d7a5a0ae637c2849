"""Is a checkpoint what its manifest says? In three depths: sizes, digests, every byte."""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Any

import numpy as np

from core.dist_checkpointing.format.contents import Contents, ListedFiles, files_of
from core.dist_checkpointing.format.digest import cell_crc, file_crc, json_crc
from core.dist_checkpointing.format.grid import blocks, cell_name, cells
from core.dist_checkpointing.format.json_files import canonical_json, parse_json
from core.dist_checkpointing.format.zarr_metadata import check_metadata
from core.dist_checkpointing.publish.manifest import (
    MANIFEST,
    SIGNATURE,
    Manifest,
    grid_shape,
    planned_files,
    read_manifest,
)
from core.dist_checkpointing.storage.checkpoint_dir import CheckpointDir, PosixCheckpointDir
from core.dist_checkpointing.storage.zarr_store import Reader
from core.dist_checkpointing.tools.console import printable
from core.parallel_state.flat import Box, extent, volume

_MALFORMED = (KeyError, TypeError, ValueError, ZeroDivisionError)  # what reading strange metadata may raise
_AT_ONCE = 64 << 20  # bytes of a cell; ours have 16 MiB
Problems = dict[str, str]  # file -> what is wrong with it
Each = Callable[[Callable[[str], str | None], Iterable[str]], Problems]
Node = dict[str, Any]  # the content of a zarr.json


def check(place: CheckpointDir, *, digests: bool = False, full: bool = False, jobs: int = 32) -> list[str]:
    """What is wrong with a checkpoint, each line naming its file; empty: nothing.

    Always: the manifest, and the size of every file. `digests`: also the crc of every file, which reads a few bytes
    of each cell, that the arrays have all their cells, that `StoredCheckpoint.open` takes the metadata, and that no
    other reader finds another one. `full`: also every byte, and files that do not belong.
    """
    try:
        manifest = read_manifest(place)
    except (OSError, ValueError) as error:
        return [printable(str(error))]
    each = partial(_each, jobs)
    found = each(partial(_size, place, manifest), manifest.files)
    if digests or full:
        nodes = _nodes(each, place, manifest, found)
        found |= _contents(manifest, nodes, found)
        metadata = {path: node for path, node in nodes.items() if node["node_type"] == "array"}
        cell_files = [path for path in manifest.files if not path.endswith(".json") and path not in found]
        found |= each(partial(_digest, place, manifest, metadata), cell_files)
    if full:
        held = ListedFiles(manifest.files)
        for key, array in metadata.items():
            found |= _payload(place, key, array, held, found)
        extra = set(place.names()) - manifest.files.keys() - {MANIFEST, SIGNATURE}
        found |= dict.fromkeys(extra, "is not in the manifest")
    return [printable(f"{place.url}{path}: {found[path]}") for path in sorted(found)]


def _each(jobs: int, problem: Callable[[str], str | None], paths: Iterable[str]) -> Problems:
    """What `problem` says of the paths, in threads: each is mostly waiting for a disk or a network."""
    paths = list(paths)
    jobs = max(1, min(jobs, len(paths) // 8))

    def told(path: str) -> str | None:
        try:
            return problem(path)
        except (OSError, ValueError, MemoryError) as error:
            return f"cannot be read ({error})"

    def some(first: int) -> Problems:
        return {path: text for path in paths[first::jobs] if (text := told(path))}

    if jobs == 1:
        return some(0)
    with ThreadPoolExecutor(jobs, thread_name_prefix="checkpoint-check") as pool:
        return dict(ChainMap(*pool.map(some, range(jobs))))


def _size(place: CheckpointDir, manifest: Manifest, path: str) -> str | None:
    expected = manifest.files[path][0]
    size = place.size(path, expected)
    if size == expected:
        return None
    return "is missing" if size is None else f"has {size} bytes, the manifest says {expected}"


def _json(place: CheckpointDir, manifest: Manifest, path: str) -> str | None:
    """JSON files are small, a part of them is not worth reading."""
    expected, crc = manifest.files[path][1], json_crc(place.read(path))
    return None if crc == expected else f"is damaged: its crc is {crc}, the manifest says {expected}"


def _nodes(each: Each, place: CheckpointDir, manifest: Manifest, found: Problems) -> dict[str, Node]:
    """Path -> zarr.json of the groups and arrays that can be read; adds to `found` what is wrong with JSON files."""
    files = [path for path in manifest.files if path.endswith(".json") and path not in found]
    found |= each(partial(_json, place, manifest), files)
    nodes = {}
    for file in files:
        if file in found or not f"/{file}".endswith("/zarr.json"):
            continue
        path = file.removesuffix("zarr.json").rstrip("/")
        try:
            node = parse_json(place.read(file), place.url + file)
            unlisted = _needed(path, node, manifest) - manifest.files.keys()
        except (OSError, *_MALFORMED) as error:
            found[file] = f"is no metadata of a checkpoint ({error})"
            continue
        found |= dict.fromkeys(unlisted, "is not in the manifest")
        nodes[path] = node
    return nodes


def _needed(path: str, node: Node, manifest: Manifest) -> set[str]:
    """The files of a group or array; counted before they are named, for a shape may say anything."""
    if node["node_type"] not in ("array", "group"):
        raise ValueError(f"node_type {node['node_type']!r}")
    if node["node_type"] == "array":
        check_metadata(path, node)
        if prod(grid_shape(node)) > len(manifest.files):
            raise ValueError(f"shape {node['shape']}: more cells than the manifest has files, {len(manifest.files)}")
    return planned_files({path: node})


def _contents(manifest: Manifest, nodes: Mapping[str, Node], found: Problems) -> Problems:
    """Where the root's zarr.json is not one that can be opened, or another zarr.json is not what it says there, which
    is read here: its checksum alone can be made to fit."""
    if "zarr.json" in found:
        return {}
    if "" not in nodes:
        return {"zarr.json": "is not in the manifest"}
    try:
        expected = Contents.from_root(nodes[""], manifest.files).nodes
    except ValueError as error:
        return {"zarr.json": str(error)}
    both = {file: path for file, path in files_of(expected).items() if path in nodes}
    other = [file for file, path in both.items() if canonical_json(nodes[path]) != canonical_json(expected[path])]
    return dict.fromkeys(other, "says otherwise than zarr.json says of it")


def _digest(place: CheckpointDir, manifest: Manifest, metadata: Mapping[str, Node], path: str) -> str | None:
    array = metadata.get(path.rpartition("/")[0])
    if array is None:
        return None if f"{path.rpartition('/')[0]}/zarr.json" in manifest.files else "belongs to no array"
    size, expected = manifest.files[path]
    try:
        _, crc = crc_of(place, path, array, size=size)
    except (OSError, *_MALFORMED) as error:
        return f"is damaged ({error})"
    return None if crc == expected else f"is damaged: its digest is {crc}, the manifest says {expected}"


def _payload(place: CheckpointDir, key: str, array: Node, held: ListedFiles, found: Problems) -> Problems:
    """Reads every cell of an array not known to be bad: all at once, one by one if there is something wrong."""
    try:
        held.check(key, array)
    except ValueError as error:
        return {f"{key}/zarr.json": str(error)}
    grid = cells(tuple(array["shape"]), tuple(array["chunk_grid"]["configuration"]["chunk_shape"]))
    boxes = {name: box for index, box in grid if (name := f"{key}/{cell_name(index)}") not in found}
    if _unreadable(place, key, array, boxes.values()) is None:
        return {}
    wrong = {name: _unreadable(place, key, array, [box]) for name, box in boxes.items()}
    return {name: error for name, error in wrong.items() if error}


def _unreadable(place: CheckpointDir, key: str, array: Node, boxes: Iterable[Box]) -> str | None:
    reader, dtype = Reader(place, {key: array}), np.dtype(array["data_type"])
    try:
        for box in boxes:
            for part in [box] if volume(box) * dtype.itemsize <= _AT_ONCE else blocks(box):
                reader.read(key, part, np.empty(extent(part), dtype))
        reader.finish()
    except (OSError, MemoryError, *_MALFORMED) as error:
        return str(error)
    return None


def crc_of(place: CheckpointDir, name: str, metadata: Mapping[str, Any], *, size: int = 1) -> tuple[int, int]:
    """(size, digest) of a cell's file; `size`: what is expected, which saves requests to object stores.

    Raises FileNotFoundError; ValueError naming the file: it cannot be a cell.
    """
    if isinstance(place, PosixCheckpointDir):
        return file_crc(place.url + name, metadata)
    found = place.size(name, size)
    if found is None:
        raise FileNotFoundError(place.url + name)
    return found, cell_crc(partial(place.read, name), found, metadata)
