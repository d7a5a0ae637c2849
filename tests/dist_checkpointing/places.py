"""Stand-ins and damage for the tests of the store."""

import numpy as np
import tensorstore as ts

from core.dist_checkpointing.format.arrays import STORED_DTYPES, ArrayInfo
from core.dist_checkpointing.format.grid import cell_name, cells
from core.dist_checkpointing.format.json_files import canonical_json
from core.dist_checkpointing.format.zarr_metadata import array_metadata, group_metadata
from core.dist_checkpointing.storage.zarr_store import Writer
from core.parallel_state.flat import slices


class Folder:
    """A directory as the store sees it."""

    context = None

    def __init__(self, path):
        self.path, self.url = path, str(path)

    def kvstore(self, prefix=""):
        return {"driver": "file", "path": f"{self.path}/{prefix}"}


class Memory:
    """A store in this process."""

    url = "memory://"

    def __init__(self):
        self.context = ts.Context()

    def kvstore(self, prefix=""):
        return {"driver": "memory", "path": prefix}


def random_array(shape, dtype, seed=0):
    """Any bits at all, as they are stored."""
    stored = np.dtype(STORED_DTYPES[dtype][0])
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    bits = rng.integers(0, 256, (*shape, stored.itemsize), dtype=np.uint8)
    return bits.view(stored).reshape(shape)


def described(array, cell, inner=None, dtype=None, **attributes):
    """The metadata of an array in memory."""
    return array_metadata(ArrayInfo(array.shape, dtype or str(array.dtype)), cell, inner, attributes)


def cells_of(metadata):
    """Index and box of every cell."""
    return list(cells(tuple(metadata["shape"]), tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])))


def write(place, arrays, metadata, *, backwards=False, **options):
    """Every cell of these arrays."""
    writer = Writer(place, metadata, **options)
    todo = [(key, box) for key in arrays for _, box in cells_of(metadata[key])]
    for key, box in reversed(todo) if backwards else todo:
        writer.write(key, box, arrays[key][(*slices(box), ...)])
    writer.finish()


def write_json(path, metadata, attributes):
    """Every zarr.json, as the commit does."""
    for key, value in {**metadata, **group_metadata(metadata, attributes)}.items():
        (path / key).mkdir(parents=True, exist_ok=True)
        (path / key / "zarr.json").write_bytes(canonical_json(value))


def cell_files(path, key, metadata):
    """The path of every cell."""
    return [path / key / cell_name(index) for index, _ in cells_of(metadata)]


def flipped(data, at):
    """One bit is another."""
    damaged = bytearray(data)
    damaged[at] ^= 16
    return bytes(damaged)
