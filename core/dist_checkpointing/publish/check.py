"""Is a checkpoint what its manifest says? In three depths: sizes, digests, every byte."""

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

# what reading strange metadata may raise
_MALFORMED = (KeyError, TypeError, ValueError, ZeroDivisionError)
_MAX_READ_BYTES = 64 << 20  # of a cell, at once; ours have 16 MiB
Problems = dict[str, str]  # file -> what is wrong with it
# (check of one file, files) -> problems
ForEach = Callable[[Callable[[str], str | None], Iterable[str]], Problems]
Node = dict[str, Any]  # the content of a zarr.json


def check(
    directory: CheckpointDir, *, digests: bool = False, full: bool = False, jobs: int = 32
) -> list[str]:
    """What is wrong with a checkpoint, each line naming its file; empty: nothing.

    Always: the manifest, and the size of every file. `digests`: also the crc of every file, which reads a few bytes
    of each cell, that the arrays have all their cells, that `StoredCheckpoint.open` takes the metadata, and that no
    other reader finds another one. `full`: also every byte, and files that do not belong.
    """
    try:
        manifest = read_manifest(directory)
    except (OSError, ValueError) as error:
        return [printable(str(error))]
    for_each = partial(_for_each, jobs)
    problems = for_each(partial(_check_size, directory, manifest), manifest.files)
    if digests or full:
        # each step leaves out the files that are known to be bad
        nodes = _read_nodes(for_each, directory, manifest, problems)
        problems |= _check_contents(manifest, nodes, problems)
        metadata = {path: node for path, node in nodes.items() if node["node_type"] == "array"}
        cell_files = [
            path for path in manifest.files if not path.endswith(".json") and path not in problems
        ]
        problems |= for_each(partial(_check_digest, directory, manifest, metadata), cell_files)
    if full:
        listed = ListedFiles(manifest.files)
        for key, array in metadata.items():
            problems |= _check_payload(directory, key, array, listed, problems)
        unlisted = set(directory.names()) - manifest.files.keys() - {MANIFEST, SIGNATURE}
        problems |= dict.fromkeys(unlisted, "is not in the manifest")
    return [printable(f"{directory.url}{path}: {problems[path]}") for path in sorted(problems)]


def check_before_reading(directory: CheckpointDir) -> list[str]:
    """What is missing, or of another size; [] if nothing is.

    Of an object store only what is missing, by one listing: a size would be a request for each file, and each cell's
    is seen when it is read.
    """
    if isinstance(directory, PosixCheckpointDir):
        return check(directory)
    manifest = read_manifest(directory)
    missing = sorted(manifest.files.keys() - set(directory.names()))
    return [printable(f"{directory.url}{path}: is missing") for path in missing]


def _for_each(jobs: int, check_file: Callable[[str], str | None], paths: Iterable[str]) -> Problems:
    """What `check_file` says of the paths, in threads: each is mostly waiting for a disk or a network."""
    paths = list(paths)
    # a thread for less than eight files costs more than it saves
    jobs = max(1, min(jobs, len(paths) // 8))

    def check_share(first: int) -> Problems:
        problems = {}
        for path in paths[first::jobs]:
            try:
                problem = check_file(path)
            except (OSError, ValueError, MemoryError) as error:
                problem = f"cannot be read ({error})"
            if problem:
                problems[path] = problem
        return problems

    if jobs == 1:
        return check_share(0)
    all_problems: Problems = {}
    with ThreadPoolExecutor(jobs, thread_name_prefix="checkpoint-check") as pool:
        for problems in pool.map(check_share, range(jobs)):
            all_problems |= problems
    return all_problems


def _check_size(directory: CheckpointDir, manifest: Manifest, path: str) -> str | None:
    expected = manifest.files[path][0]
    size = directory.size(path, expected)
    if size == expected:
        return None
    if size is None:
        return "is missing"
    return f"has {size} bytes, the manifest says {expected}"


def _check_json(directory: CheckpointDir, manifest: Manifest, path: str) -> str | None:
    """By all its bytes: JSON files are small."""
    expected = manifest.files[path][1]
    crc = json_crc(directory.read(path))
    if crc == expected:
        return None
    return f"is damaged: its crc is {crc}, the manifest says {expected}"


def _read_nodes(
    for_each: ForEach, directory: CheckpointDir, manifest: Manifest, problems: Problems
) -> dict[str, Node]:
    """Path -> zarr.json of the groups and arrays that can be read; adds what is wrong with JSON files to `problems`.

    A file with a problem is read no further.
    """
    files = [path for path in manifest.files if path.endswith(".json") and path not in problems]
    problems |= for_each(partial(_check_json, directory, manifest), files)
    nodes = {}
    for file in files:
        if file in problems or not f"/{file}".endswith("/zarr.json"):
            continue
        path = file.removesuffix("zarr.json").rstrip("/")
        try:
            node = parse_json(directory.read(file), directory.url + file)
            unlisted = _files_of_node(path, node, manifest) - manifest.files.keys()
        except (OSError, *_MALFORMED) as error:
            problems[file] = f"is no metadata of a checkpoint ({error})"
            continue
        problems |= dict.fromkeys(unlisted, "is not in the manifest")
        nodes[path] = node
    return nodes


def _files_of_node(path: str, node: Node, manifest: Manifest) -> set[str]:
    """The files of a group or array; counted before they are named, for a shape may say anything."""
    if node["node_type"] not in ("array", "group"):
        raise ValueError(f"node_type {node['node_type']!r}")
    if node["node_type"] == "array":
        check_metadata(path, node)
        if prod(grid_shape(node)) > len(manifest.files):
            raise ValueError(
                f"shape {node['shape']}: more cells than the manifest has files, {len(manifest.files)}"
            )
    return planned_files({path: node})


def _check_contents(manifest: Manifest, nodes: Mapping[str, Node], problems: Problems) -> Problems:
    """Where the root's zarr.json cannot be opened, or another zarr.json is not what the root's says of it.

    That one is compared as it was read here: its checksum alone can be made to fit.
    """
    if "zarr.json" in problems:
        return {}
    if "" not in nodes:
        return {"zarr.json": "is not in the manifest"}
    # the same judgement as of a reader that opens the checkpoint
    try:
        expected = Contents.from_root(nodes[""], manifest.files).nodes
    except ValueError as error:
        return {"zarr.json": str(error)}
    differing = []
    for file, path in files_of(expected).items():
        if path in nodes and canonical_json(nodes[path]) != canonical_json(expected[path]):
            differing.append(file)
    return dict.fromkeys(differing, "says otherwise than zarr.json says of it")


def _check_digest(
    directory: CheckpointDir, manifest: Manifest, metadata: Mapping[str, Node], path: str
) -> str | None:
    key = path.rpartition("/")[0]
    array = metadata.get(key)
    # its zarr.json is not listed, or reported as damaged already
    if array is None:
        if f"{key}/zarr.json" in manifest.files:
            return None
        return "belongs to no array"
    size, expected = manifest.files[path]
    try:
        _, crc = crc_of(directory, path, array, size=size)
    except (OSError, *_MALFORMED) as error:
        return f"is damaged ({error})"
    if crc == expected:
        return None
    return f"is damaged: its digest is {crc}, the manifest says {expected}"


def _check_payload(
    directory: CheckpointDir, key: str, array: Node, listed: ListedFiles, problems: Problems
) -> Problems:
    """Reads every cell of an array not known to be bad: all at once, one by one if there is something wrong."""
    try:
        listed.check(key, array)
    except ValueError as error:
        return {f"{key}/zarr.json": str(error)}
    cell_shape = tuple(array["chunk_grid"]["configuration"]["chunk_shape"])
    boxes = {}
    for index, box in cells(tuple(array["shape"]), cell_shape):
        name = f"{key}/{cell_name(index)}"
        if name not in problems:
            boxes[name] = box
    # almost always all is well: then one pass with many reads in flight is enough
    if _read_error(directory, key, array, boxes.values()) is None:
        return {}
    damaged = {}
    for name, box in boxes.items():
        if error_text := _read_error(directory, key, array, [box]):
            damaged[name] = error_text
    return damaged


def _read_error(
    directory: CheckpointDir, key: str, array: Node, boxes: Iterable[Box]
) -> str | None:
    """Why boxes of an array cannot be read; None if they can."""
    reader = Reader(directory, {key: array})
    dtype = np.dtype(array["data_type"])
    try:
        for box in boxes:
            fits = volume(box) * dtype.itemsize <= _MAX_READ_BYTES
            for part_box in [box] if fits else blocks(box):
                reader.read(key, part_box, np.empty(extent(part_box), dtype))
        reader.finish()
    except (OSError, MemoryError, *_MALFORMED) as error:
        return str(error)
    return None


def crc_of(
    directory: CheckpointDir, name: str, metadata: Mapping[str, Any], *, size: int = 1
) -> tuple[int, int]:
    """(size, digest) of a cell's file; `size`: what is expected, which saves requests to object stores.

    Raises FileNotFoundError; ValueError naming the file: it cannot be a cell.
    """
    # a local file is opened once, for its size and for the few bytes of the digest
    if isinstance(directory, PosixCheckpointDir):
        return file_crc(directory.url + name, metadata)
    actual_size = directory.size(name, size)
    if actual_size is None:
        raise FileNotFoundError(directory.url + name)
    return actual_size, cell_crc(partial(directory.read, name), actual_size, metadata)
