"""Where the local shard of a DTensor lies in the full tensor: arithmetic on its mesh and placements, no collective.

`fully_shard` behind tensor parallelism cuts what is cut already; torch calls that a strided shard. The local tensor
is then several intervals of a dim, in rare cases, so that one DTensor can be several boxes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from core.dist_checkpointing.state.mapping import ShardedTensor
from core.parallel_state.flat import slices

# of one dim of the full tensor, in the order in which they lie in memory
Intervals = list[tuple[int, int]]


def local_shards(sharded: ShardedTensor) -> list[ShardedTensor]:
    """This rank's boxes of a DTensor, in its memory, without padding; none on a rank outside of its mesh.

    Raises ValueError: partial values, which are no values yet, and placements that torch may invent.
    """
    tensor: Any = sharded.data
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    local = tensor.detach().to_local()
    axes = sharded.prepend_axis_num
    try:
        intervals_by_dim = local_intervals(
            tuple(tensor.shape), tensor.placements, tensor.device_mesh.shape, coordinate
        )
    except ValueError as error:
        raise ValueError(f"{sharded.key} is a DTensor, {error}") from None
    expected_shape = [
        sum(stop - start for start, stop in intervals) for intervals in intervals_by_dim
    ]
    if list(local.shape) != expected_shape:
        raise ValueError(
            f"{sharded.key} is a DTensor of shape {list(tensor.shape)}, {tensor.placements}, but "
            f"{list(local.shape)} is here; make it with distribute_tensor, or give from_local its whole shape"
        )
    # several intervals of a dim make several boxes: every combination is one shard
    stack_offset = sharded.global_offset[:axes]
    tensor_offset = sharded.global_offset[axes:]
    true_shape = sharded.global_shape[axes:]
    shards = []
    for local_box in product(*map(_local_and_global, intervals_by_dim)):
        offset = []
        inside = []
        for ((start, stop), global_start), origin, size in zip(
            local_box, tensor_offset, true_shape, strict=True
        ):
            position = global_start + origin
            offset.append(position)
            # rows behind the end of the true tensor are padding
            inside.append((start, min(stop, start + max(size - position, 0))))
        if all(start < stop for start, stop in inside):
            data = local[slices(tuple(inside))]
            shards.append(replace(sharded, data=data, global_offset=(*stack_offset, *offset)))
    return shards


def shards_of_sharded_tensor(key: str, tensor: Any) -> list[ShardedTensor]:
    """This rank's shards of torch's ShardedTensor, in its memory: its metadata says where they lie."""
    shape = tuple(tensor.metadata().size)
    shards = []
    for shard in tensor.local_shards():
        offset = tuple(shard.metadata.shard_offsets)
        shards.append(ShardedTensor(key, shard.tensor.detach(), shape, offset))
    return shards


def local_intervals(
    shape: Sequence[int], placements: Sequence[Any], mesh: Sequence[int], coordinate: Sequence[int]
) -> list[Intervals]:
    """Of each dim, which intervals the rank at this coordinate of the mesh holds: cut from left to right.

    Raises ValueError: a placement that is neither Shard nor Replicate.
    """
    intervals_by_dim = [[(0, size)] for size in shape]
    for placement, mesh_dim_size, position in zip(placements, mesh, coordinate, strict=True):
        if placement.is_partial():
            raise ValueError(
                f"of {placement}: its parts are to be added up first; give tensor.redistribute(placements=...) of "
                "Shard or Replicate"
            )
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ValueError(
                f"of {placement}, which is unknown here; redistribute it to Shard and Replicate"
            )
        # a strided shard is cut in `split_factor` strides first, and the rank takes its chunk of each stride
        local: Intervals = []
        for stride in _chunked(intervals_by_dim[dim], getattr(placement, "split_factor", 1)):
            local += _chunked(stride, mesh_dim_size)[position]
        intervals_by_dim[dim] = local
    return intervals_by_dim


def _chunked(intervals: Intervals, count: int) -> list[Intervals]:
    """In `count` chunks as torch.chunk does: the first ones are full, the last ones may be empty."""
    total = sum(stop - start for start, stop in intervals)
    size = -(-total // count)
    starts = [min(number * size, total) for number in range(count + 1)]
    return [_cut(intervals, starts[number], starts[number + 1]) for number in range(count)]


def _cut(intervals: Intervals, start: int, stop: int) -> Intervals:
    """The elements from `start` to `stop`, counted along the intervals."""
    inside = []
    counted = 0
    for interval_start, interval_stop in intervals:
        first = max(interval_start, interval_start + start - counted)
        last = min(interval_stop, interval_start + stop - counted)
        if first < last:
            inside.append((first, last))
        counted += interval_stop - interval_start
    return inside


def _local_and_global(intervals: Intervals) -> list[tuple[tuple[int, int], int]]:
    """(interval of the local dim, where it begins in the full dim); neighbours in both are joined."""
    pairs: list[tuple[tuple[int, int], int]] = []
    local_start = 0
    for start, stop in intervals:
        local_stop = local_start + stop - start
        if pairs:
            (joined_local, _), joined_global = pairs[-1]
            if joined_global + local_start - joined_local == start:
                pairs[-1] = (joined_local, local_stop), joined_global
                local_start = local_stop
                continue
        pairs.append(((local_start, local_stop), start))
        local_start = local_stop
    return pairs
