"""`diff`: where two checkpoints differ, by the digests in their manifests; values are read where grids differ."""

from collections.abc import Iterator
from math import prod

import numpy as np

from core.dist_checkpointing.format.grid import blocks, cell_name, cells
from core.dist_checkpointing.format.zarr_metadata import Chunking
from core.dist_checkpointing.publish.manifest import grid_shape
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.tools.stream import stream
from core.parallel_state.flat import whole


def differences(a: StoredCheckpoint, b: StoredCheckpoint) -> Iterator[str]:
    """A line for each array and object that is not the same."""
    for mine, other, side in ((a, b, "A"), (b, a, "B")):
        for key in mine.keys:
            if key not in other.metadata:
                derived = other.derived.get(key)
                yield f"only in {side}: {key}" + (
                    f" (the other derives it from {derived['from']})" if derived else ""
                )
    for key in a.keys:
        if key in b.metadata and (how := _differs(a, b, key)):
            yield f"differs: {key}: {how}"
    for what, mine_, other_ in (("derived", a.derived, b.derived), ("object", a.objects, b.objects)):
        for key in sorted(mine_.keys() | other_.keys()):
            if mine_.get(key) != other_.get(key) or (key in mine_) != (key in other_):
                yield f"{what} {key}: {mine_.get(key, 'missing')} in A, {other_.get(key, 'missing')} in B"


def _differs(a: StoredCheckpoint, b: StoredCheckpoint, key: str) -> str | None:
    if a.shape(key) != b.shape(key) or a.dtype(key) != b.dtype(key):
        return f"{a.dtype(key)} of {a.shape(key)} in A, {b.dtype(key)} of {b.shape(key)} in B"
    if Chunking.from_metadata(a.metadata[key]) == Chunking.from_metadata(b.metadata[key]):
        grid = cells(a.shape(key), a.cell(key))
        names = [f"{key}/{cell_name(index)}" for index, _ in grid]
        count = sum(a.manifest.files.get(name) != b.manifest.files.get(name) for name in names)
        return f"{count} of {prod(grid_shape(a.metadata[key]))} cells" if count else None
    count = _unequal_values(a, b, key)
    return f"{count} of {prod(a.shape(key))} values" if count else None


def _unequal_values(a: StoredCheckpoint, b: StoredCheckpoint, key: str) -> int:
    """How many values differ in any bit."""
    wanted = [(key, block) for block in blocks(whole(a.shape(key)))]
    return sum(
        int(np.count_nonzero(_bits(x) != _bits(y))) for x, y in zip(stream(a, wanted), stream(b, wanted), strict=True)
    )


def _bits(array: np.ndarray) -> np.ndarray:
    """NaN equals NaN, and -0 is not 0."""
    return array.view(f"u{array.itemsize}" if array.itemsize <= 8 else "V16")
