"""A checkpoint in miniature, written without the engine: valid zarr files, whose every number is one `version`."""

import json
import zlib
from uuid import uuid4

import numpy as np
import pytest
import tensorstore as ts

from core.dist_checkpointing.format.json_files import canonical_json
from core.dist_checkpointing.publish import commit as committing
from core.dist_checkpointing.storage.kv_checkpoint_dir import KvCheckpointDir

WORLD = 2
PLACES = ["posix", "memory", "file"]  # the last two are key-value stores, which differ in their places alone
STORES = ["posix", "memory", pytest.param("file", marks=pytest.mark.full)]


def store(kind, folder):
    """Where a CheckpointRoot lies: a path, or a key-value store."""
    if kind == "posix":
        return folder / "root"
    spec = {"driver": kind, "path": "steps/" if kind == "memory" else f"{folder}/steps/"}
    context = ts.Context()
    return KvCheckpointDir(ts.KvStore.open(spec, context=context).result(), context)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def array(shape, cell):
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": cell}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": "NaN",
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "attributes": {},
    }


def consolidated(nodes):
    return {"consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": nodes}}


GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
ARRAYS = {"model/a": array([3, 2], [2, 2]), "model/b": array([], [])}
ROOT = {**GROUP, "attributes": {"paracore": {"format": 1, "objects": {}, "derived": {}}}}
ROOT |= consolidated({"model": GROUP | consolidated({}), **ARRAYS})
METADATA = {"": ROOT, "model": GROUP, **ARRAYS}
CELLS = {"model/a/c.0.0": 4, "model/a/c.1.0": 4, "model/b/c": 1}


def files_of(rank, version):
    """Path -> content of what one of two ranks writes: rank 0 the metadata and every second cell."""
    cells = {path: np.full(n, version, "<f4").tobytes() for path, n in list(CELLS.items())[rank::WORLD]}
    files = {path: payload + crc32c(payload) for path, payload in cells.items()}
    if rank == 0:
        files |= {f"{path}/zarr.json".lstrip("/"): canonical_json(node) for path, node in METADATA.items()}
    return files


def entry(path, data):
    """[size, crc] of a file."""
    return len(data), zlib.crc32(data if path.endswith(".json") else data[-4:])


def write_rank(place, rank, version, folder="receipts"):
    files = files_of(rank, version)
    place.write_all(files)
    committing.write_receipt(place, rank, {path: entry(path, data) for path, data in files.items()}, folder)


def save(root, step, version, *, uuid=None, timeout_s=5):
    """All of a save: two ranks, one after the other, and the committer."""
    uuid = uuid or uuid4().hex
    place = root.begin(step, uuid)
    for rank in range(WORLD):
        write_rank(place, rank, version, committing.receipts_folder(uuid, rank, WORLD))
    for rank in range(WORLD):
        committing.merge_receipts(root, step, uuid, rank, WORLD, timeout_s)
    committed(root, step, uuid, {"version": version}, timeout_s)


def committed(root, step, uuid, run=None, timeout_s=5):
    """What the committer does."""
    planned = committing.planned_files(METADATA)
    committing.commit(root, step, uuid, planned, world_size=WORLD, run=run or {}, timeout_s=timeout_s)


def version_of(place):
    """The one number in all cells; fails if a file is missing, of another save, or not what the manifest says.

    An oracle of its own: it shares no code with `check`.
    """
    manifest = json.loads(place.read("manifest.json"))
    expected = {*CELLS, *(f"{path}/zarr.json".lstrip("/") for path in METADATA)}
    expected |= {f"receipts/{rank:05d}.json" for rank in range(WORLD)}
    assert manifest["files"].keys() == expected
    contents = {path: place.read(path) for path in expected}
    assert {path: list(entry(path, data)) for path, data in contents.items()} == manifest["files"]
    numbers = {number for path in CELLS for number in np.frombuffer(contents[path][:-4], "<f4").tolist()}
    assert len(numbers) == 1
    return int(numbers.pop())


def files_beside_the_index(root):
    """All that lies there, but for what tells where it lies."""
    return [name for name in root.files.names() if not name.startswith(".index")]
