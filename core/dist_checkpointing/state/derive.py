"""Which arrays need not be stored, because another one says the same bit for bit.

With float32 main (master) weights beside 16-bit weights, the weights are `main` rounded: 12 bytes per parameter
instead of 14. That is compared at every save, since stochastic rounding, a weight edited by hand or a frozen one
break it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from core.dist_checkpointing.format.arrays import Arrays
from core.dist_checkpointing.state.catalog import LocalState
from core.dist_checkpointing.state.mapping import ShardedTensor
from core.parallel_state.environment import reading_waits
from core.parallel_state.flat import Box, intersect, relative, slices, volume

MODEL = "model/"
MAIN = "optimizer/main/"
# at a time, so that the rounded copy stays in cache
COMPARED_ELEMENTS = 1 << 20
# few kernels, and 100 MiB beside them
COMPARED_ON_DEVICE = 1 << 25
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weight_main_pairs(keys: Any) -> Iterator[tuple[str, str]]:
    """(weight, main) keys of the same parameter."""
    for key in keys:
        weight = MODEL + key.removeprefix(MAIN)
        if key.startswith(MAIN) and weight in keys:
            yield weight, key


def unequal_weights(state: LocalState) -> list[str]:
    """Keys of this rank's weights that are not their main weights rounded, in at least one element.

    On an accelerator the host waits once, for all of them.
    """
    unequal: list[str] = []
    asked: dict[str, Tensor] = {}  # what the device will say
    for weight, main in weight_main_pairs(state.shards):
        answers = []
        for is_rounded in _comparisons(state.shards[weight], state.shards[main]):
            if isinstance(is_rounded, Tensor):
                answers.append(is_rounded)
            elif not is_rounded:
                unequal.append(weight)
                break
        else:
            if answers:
                asked[weight] = torch.stack(answers).all()
    told = torch.stack(list(asked.values())).tolist() if asked else []
    return unequal + [
        weight for weight, is_rounded in zip(asked, told, strict=True) if not is_rounded
    ]


def _comparisons(
    weights: list[ShardedTensor], mains: list[ShardedTensor]
) -> Iterator[bool | Tensor]:
    """Whether each of this rank's main shards is also here as weights, and rounds to them, part by part."""
    if {main.global_shape for main in mains} != {weight.global_shape for weight in weights}:
        yield False
        return
    for main in mains:
        compared = 0
        for weight in weights:
            overlap = intersect(main.box, weight.box)
            if overlap is None:
                continue
            compared += volume(overlap)
            yield from _rounds_to(_cut(main, overlap), _cut(weight, overlap))
        # a main shard without its weight on this rank proves nothing: then the weight is stored
        if compared < volume(main.box):
            yield False


def _cut(shard: ShardedTensor, box: Box) -> Tensor:
    return shard.stacked_data[slices(relative(box, shard.box))]


def _rounds_to(main: Tensor, weight: Tensor) -> Iterator[bool | Tensor]:
    """Whether every element of `main`, rounded to the dtype of `weight`, has the bits of `weight`, block by block.

    On an accelerator tensors without dims, which nobody has looked at yet.
    """
    if (
        main.data_ptr() == weight.data_ptr()
        and main.dtype == weight.dtype
        and main.stride() == weight.stride()
    ):
        return  # one tensor is both
    if not (main.is_contiguous() and weight.is_contiguous()):
        main = main.contiguous()
        weight = weight.contiguous()
    reading = reading_waits(weight.device)
    size = COMPARED_ON_DEVICE if reading else COMPARED_ELEMENTS
    for main_block, weight_block in zip(
        main.view(-1).split(size), weight.view(-1).split(size), strict=True
    ):
        rounded = _bits(main_block.to(weight_block))
        bits = _bits(weight_block)
        yield (rounded == bits).all() if reading else torch.equal(rounded, bits)


def _bits(tensor: Tensor) -> Tensor:
    """As integers: NaN equals NaN, and -0 is not 0."""
    return tensor.view(_BITS[tensor.itemsize])


def derivable(
    arrays: Arrays, stored_weights: set[str]
) -> tuple[set[str], dict[str, dict[str, str]]]:
    """(arrays that need not be stored, how a reader gets them); `stored_weights`: those that some rank found unequal.

    The more exact of two is stored; of two alike, the weight. A main weight like its weight is in no table, so that
    a run which has none beside it (one tensor is both) writes the same bytes: `stored_source` knows.
    """
    not_stored: set[str] = set()
    derived: dict[str, dict[str, str]] = {}
    for weight, main in weight_main_pairs(arrays):
        if weight in stored_weights or arrays[weight].shape != arrays[main].shape:
            continue
        if arrays[main].dtype == arrays[weight].dtype:
            not_stored.add(main)
        else:
            not_stored.add(weight)
            derived[weight] = {"from": main, "torch_dtype": arrays[weight].dtype}
    return not_stored, derived


def stored_source(
    key: str, arrays: Mapping[str, Any], derived: Mapping[str, Mapping[str, str]]
) -> str | None:
    """The stored array that `key` is read from; None if the checkpoint has nothing for it.

    Itself, what it was derived from, or, for the main weight of a run that had none, its weight.
    """
    if key in arrays:
        return key
    if key in derived and derived[key].get("from") in arrays:
        return derived[key]["from"]
    weight = MODEL + key.removeprefix(MAIN)
    if key.startswith(MAIN) and weight in arrays:
        return weight
    return None
