"""Where the local part of a DTensor lies in the whole: arithmetic on its mesh and placements, no collective.

`fully_shard` behind tensor parallelism cuts what is cut already; torch calls that a strided shard. A local part is
then several intervals of a dim, in rare cases, so that one DTensor can be several boxes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from core.dist_checkpointing.state.mapping import ShardedTensor
from core.parallel_state.flat import slices

Intervals = list[tuple[int, int]]  # of one dim of the whole, in the order in which they lie in memory


def mesh_size(tensor: Any) -> int:
    """How many ranks know of each other's parts."""
    return tensor.device_mesh.size()


def local_parts(part: ShardedTensor) -> list[ShardedTensor]:
    """This rank's boxes of a part whose data is a DTensor, in its memory, without padding; none outside of its mesh.

    Raises ValueError: partial values, which are no values yet, and placements that torch may invent.
    """
    tensor: Any = part.data
    at = tensor.device_mesh.get_coordinate()
    if at is None:
        return []
    local, axes = tensor.detach().to_local(), part.prepend_axis_num
    try:
        dims = local_intervals(tuple(tensor.shape), tensor.placements, tensor.device_mesh.shape, at)
    except ValueError as error:
        raise ValueError(f"{part.key} is a DTensor, {error}") from None
    if tuple(local.shape) != tuple(sum(b - a for a, b in dim) for dim in dims):
        raise ValueError(
            f"{part.key} is a DTensor of shape {list(tensor.shape)}, {tensor.placements}, but {list(local.shape)} is "
            "here; make it with distribute_tensor, or give from_local its whole shape"
        )
    made = []
    for pieces in product(*map(_placed, dims)):
        offset = tuple(start + o for (_, start), o in zip(pieces, part.global_offset[axes:], strict=True))
        ends = [
            min(b, a + max(n - o, 0))
            for ((a, b), _), o, n in zip(pieces, offset, part.global_shape[axes:], strict=True)
        ]
        if all(a < end for ((a, _), _), end in zip(pieces, ends, strict=True)):  # else it is padding
            data = local[slices(tuple((a, end) for ((a, _), _), end in zip(pieces, ends, strict=True)))]
            made.append(replace(part, data=data, global_offset=part.global_offset[:axes] + offset))
    return made


def shards(key: str, tensor: Any) -> list[ShardedTensor]:
    """This rank's parts of torch's ShardedTensor, in its memory: it says itself where they lie."""
    shape, held = tuple(tensor.metadata().size), tensor.local_shards()
    return [ShardedTensor(key, s.tensor.detach(), shape, tuple(s.metadata.shard_offsets)) for s in held]


def local_intervals(
    shape: Sequence[int], placements: Sequence[Any], mesh: Sequence[int], at: Sequence[int]
) -> list[Intervals]:
    """Of each dim, which intervals the rank at this coordinate of the mesh holds: cut from left to right."""
    dims = [[(0, n)] for n in shape]
    for placement, count, rank in zip(placements, mesh, at, strict=True):
        if placement.is_partial():
            raise ValueError(
                f"of {placement}: its parts are to be added up first; give tensor.redistribute(placements=...) of "
                "Shard or Replicate"
            )
        if placement.is_replicate():
            continue
        if (dim := getattr(placement, "dim", None)) is None:
            raise ValueError(f"of {placement}, which is unknown here; redistribute it to Shard and Replicate")
        strides = _chunks(dims[dim], getattr(placement, "split_factor", 1))
        dims[dim] = [piece for stride in strides for piece in _chunks(stride, count)[rank]]
    return dims


def _chunks(intervals: Intervals, count: int) -> list[Intervals]:
    """In `count` parts as torch.chunk does: the first ones are full, the last ones may be empty."""
    total = sum(b - a for a, b in intervals)
    size = -(-total // count)
    return [_cut(intervals, min(i * size, total), min((i + 1) * size, total)) for i in range(count)]


def _cut(intervals: Intervals, start: int, stop: int) -> Intervals:
    """The elements from `start` to `stop`, counted along the intervals."""
    found, seen = [], 0
    for a, b in intervals:
        first, last = max(a, a + start - seen), min(b, a + stop - seen)
        if first < last:
            found.append((first, last))
        seen += b - a
    return found


def _placed(dim: Intervals) -> list[tuple[tuple[int, int], int]]:
    """(interval of the local dim, where it begins in the whole); neighbours are one."""
    found: list[tuple[tuple[int, int], int]] = []
    seen = 0
    for a, b in dim:
        if found and found[-1][1] + seen - found[-1][0][0] == a:
            found[-1] = (found[-1][0][0], seen + b - a), found[-1][1]
        else:
            found.append(((seen, seen + b - a), a))
        seen += b - a
    return found
