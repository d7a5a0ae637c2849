"""`diff`: where two checkpoints differ, by the digests in their manifests; values are read where grids differ."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from core.dist_checkpointing.format.grid import blocks, cell_name, cells
from core.dist_checkpointing.format.zarr_metadata import Chunking
from core.dist_checkpointing.publish.manifest import grid_shape
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.reading.stream import stream
from core.parallel_state.flat import whole


def differences(a: StoredCheckpoint, b: StoredCheckpoint) -> Iterator[str]:
    """A line for each array and object that is not the same."""
    yield from _only_in("A", a, b)
    yield from _only_in("B", b, a)
    for key in a.keys:
        if key in b.metadata and (difference := _array_difference(a, b, key)):
            yield f"differs: {key}: {difference}"
    yield from _value_differences("derived", a.derived, b.derived)
    yield from _value_differences("object", a.objects, b.objects)


def _only_in(side: str, stored: StoredCheckpoint, other: StoredCheckpoint) -> Iterator[str]:
    for key in stored.keys:
        if key not in other.metadata:
            derived = other.derived.get(key)
            hint = ""
            if derived:
                hint = f" (the other derives it from {derived['from']})"
            yield f"only in {side}: {key}{hint}"


def _value_differences(kind: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key) or (key in a) != (key in b):
            yield f"{kind} {key}: {a.get(key, 'missing')} in A, {b.get(key, 'missing')} in B"


def _array_difference(a: StoredCheckpoint, b: StoredCheckpoint, key: str) -> str | None:
    if a.shape(key) != b.shape(key) or a.dtype(key) != b.dtype(key):
        return f"{a.dtype(key)} of {a.shape(key)} in A, {b.dtype(key)} of {b.shape(key)} in B"
    if Chunking.from_metadata(a.metadata[key]) == Chunking.from_metadata(b.metadata[key]):
        # cells of one grid: equal sizes and digests are equal bytes
        count = 0
        for index, _ in cells(a.shape(key), a.cell(key)):
            name = f"{key}/{cell_name(index)}"
            count += a.manifest.files.get(name) != b.manifest.files.get(name)
        if count:
            return f"{count} of {prod(grid_shape(a.metadata[key]))} cells"
        return None
    # other grids: only the values can be compared
    count = _unequal_values(a, b, key)
    if count:
        return f"{count} of {prod(a.shape(key))} values"
    return None


def _unequal_values(a: StoredCheckpoint, b: StoredCheckpoint, key: str) -> int:
    """How many values differ in any bit."""
    requests = [(key, block) for block in blocks(whole(a.shape(key)))]
    count = 0
    for a_values, b_values in zip(stream(a, requests), stream(b, requests), strict=True):
        count += int(np.count_nonzero(_bits(a_values) != _bits(b_values)))
    return count


def _bits(array: np.ndarray) -> np.ndarray:
    """As integers: NaN equals NaN, and -0 is not 0."""
    return array.view(f"u{array.itemsize}" if array.itemsize <= 8 else "V16")
