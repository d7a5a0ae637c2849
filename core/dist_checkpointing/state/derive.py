"""Which arrays need not be stored, because another one says the same bit for bit.

With float32 main parameters beside 16-bit weights, weights are `main` rounded: 12 bytes per parameter instead of 14.
That is compared at every save, since stochastic rounding, a weight edited by hand or a frozen one break it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from core.dist_checkpointing.format.arrays import Arrays
from core.dist_checkpointing.state.catalog import LocalState
from core.parallel_state.flat import Box, intersect, relative, slices, volume

MODEL, MAIN = "model/", "optimizer/main/"
BLOCK = 1 << 20  # elements compared at a time, so that the rounded copy stays in cache


def twins(keys: Any) -> Iterator[tuple[str, str]]:
    """(weight, main) keys of the same parameter."""
    for key in keys:
        if key.startswith(MAIN) and (weight := MODEL + key.removeprefix(MAIN)) in keys:
            yield weight, key


def unequal(state: LocalState) -> list[str]:
    """Weights of this rank that are not their main parameter rounded, somewhere."""
    return [weight for weight, main in twins(state.parts) if not _equal(state, weight, main)]


def _equal(state: LocalState, weight: str, main: str) -> bool:
    """Whether all of this rank's main parts are also here as weights, and round to them."""
    if {part.global_shape for part in state.parts[main]} != {part.global_shape for part in state.parts[weight]}:
        return False
    for part in state.parts[main]:
        seen = 0
        for other in state.parts[weight]:
            if (both := intersect(part.box, other.box)) is not None:
                seen += volume(both)
                if not _rounds(_cut(part.part, part.box, both), _cut(other.part, other.box, both)):
                    return False
        if seen < volume(part.box):
            return False
    return True


def _cut(tensor: Tensor, box: Box, part: Box) -> Tensor:
    return tensor[slices(relative(part, box))]


def _rounds(main: Tensor, weight: Tensor) -> bool:
    if main.data_ptr() == weight.data_ptr() and main.dtype == weight.dtype and main.stride() == weight.stride():
        return True
    if not (main.is_contiguous() and weight.is_contiguous()):
        main, weight = main.contiguous(), weight.contiguous()
    pieces = zip(main.view(-1).split(BLOCK), weight.view(-1).split(BLOCK), strict=True)
    return all(torch.equal(_bits(m.to(w)), _bits(w)) for m, w in pieces)


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals NaN, and -0 is not 0."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def left_out(arrays: Arrays, stored: set[str]) -> tuple[set[str], dict[str, dict[str, str]]]:
    """(arrays that need not be stored, how a reader gets them); `stored`: weights that some rank found unequal.

    The more exact of two is kept; of two alike, the weight. A main parameter like its weight is in no table, so that
    a run which has none beside it (one tensor is both) writes the same bytes: `source` knows.
    """
    keys: set[str] = set()
    table: dict[str, dict[str, str]] = {}
    for weight, main in twins(arrays):
        if weight in stored or arrays[weight].shape != arrays[main].shape:
            continue
        if arrays[main].dtype == arrays[weight].dtype:
            keys.add(main)
        else:
            keys.add(weight)
            table[weight] = {"from": main, "torch_dtype": arrays[weight].dtype}
    return keys, table


def source(key: str, arrays: Mapping[str, Any], table: Mapping[str, Mapping[str, str]]) -> str | None:
    """The stored array from which `key` is read: itself, what it was derived from, or, for the main parameter of a
    run that had none, its weight. None if the checkpoint has nothing for it."""
    if key in arrays:
        return key
    if key in table and table[key].get("from") in arrays:
        return table[key]["from"]
    weight = MODEL + key.removeprefix(MAIN)
    return weight if key.startswith(MAIN) and weight in arrays else None
