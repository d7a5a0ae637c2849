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


def _value_differences(
    kind: str, first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[str]:
    for key in sorted(first.keys() | second.keys()):
        if first.get(key) != second.get(key) or (key in first) != (key in second):
            yield f"{kind} {key}: {first.get(key, 'missing')} in A, {second.get(key, 'missing')} in B"


def _array_difference(first: StoredCheckpoint, second: StoredCheckpoint, key: str) -> str | None:
    if first.shape(key) != second.shape(key) or first.dtype(key) != second.dtype(key):
        return f"{first.dtype(key)} of {first.shape(key)} in A, {second.dtype(key)} of {second.shape(key)} in B"
    if Chunking.from_metadata(first.metadata[key]) == Chunking.from_metadata(second.metadata[key]):
        # cells of one grid: equal sizes and digests are equal bytes
        count = 0
        for index, _ in cells(first.shape(key), first.cell(key)):
            name = f"{key}/{cell_name(index)}"
            count += first.manifest.files.get(name) != second.manifest.files.get(name)
        if count:
            return f"{count} of {prod(grid_shape(first.metadata[key]))} cells"
        return None
    # other grids: only the values can be compared
    count = _unequal_values(first, second, key)
    if count:
        return f"{count} of {prod(first.shape(key))} values"
    return None


def _unequal_values(first: StoredCheckpoint, second: StoredCheckpoint, key: str) -> int:
    """How many values differ in any bit."""
    requests = [(key, block) for block in blocks(whole(first.shape(key)))]
    count = 0
    for a_values, b_values in zip(stream(first, requests), stream(second, requests), strict=True):
        count += int(np.count_nonzero(_bits(a_values) != _bits(b_values)))
    return count


def _bits(array: np.ndarray) -> np.ndarray:
    """As integers: NaN equals NaN, and -0 is not 0."""
    return array.view(f"u{array.itemsize}" if array.itemsize <= 8 else "V16")
