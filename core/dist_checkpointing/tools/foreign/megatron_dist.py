"""Megatron's `torch_dist`: its arguments in `common.pt`, and its model's arrays as a `GPTModel` here saves them.

Layers are one array there, too, so that names and shapes alone differ: heads, gate and up lie in one dim.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.dist_checkpointing.tools.foreign.dcp import COMMON, SavedTensor
from core.dist_checkpointing.tools.foreign.inert import Record
from core.dist_checkpointing.tools.foreign.megatron import (
    BY_COLUMNS,
    BY_ROWS,
    COPIES,
    OUTSIDE,
    RENAMED,
    WHOLE,
)
from core.dist_checkpointing.tools.foreign.torch_archive import read_archive
from core.parallel_state.flat import Box, extent

_LAYERS = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_OF_THE_MODEL = re.compile(r"(embedding|decoder|output_layer)\..+")


def arguments_of(folder: str) -> Mapping[str, Any]:
    """Megatron's `args`; {} where there is no `common.pt`, or one without them."""
    try:
        content = read_archive(os.path.join(folder, COMMON))
    except (OSError, ValueError):
        return {}
    arguments = content.get("args") if isinstance(content, dict) else None
    state = arguments.state if isinstance(arguments, Record) else None
    return state if isinstance(state, dict) and "num_attention_heads" in state else {}


def as_gpt(
    tensors: Mapping[str, SavedTensor], arguments: Mapping[str, Any]
) -> dict[str, SavedTensor]:
    """key -> the array, of all arrays: the model's as `model/NAME`, the optimizer's as they lie.

    Raises ValueError: an array of the model whose place in a GPTModel is not known.
    """
    found = {}
    for key, tensor in tensors.items():
        if not _OF_THE_MODEL.fullmatch(key) or any(part in key for part in COPIES):
            found[key] = tensor
            continue
        name = key
        for pattern, replacement in RENAMED.items():
            name = re.sub(pattern, replacement, name)
        dims = _dims(name, tensor.shape, arguments)
        if dims is None:
            raise ValueError(f"{key}: its place in a GPTModel is not known")
        found[f"model/{name}"] = _apart(key, tensor, dims)
    return found


def _dims(
    name: str, shape: tuple[int, ...], arguments: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """What dim 1 is made of, the outermost first; (): the array is as it is here. None: it has no place."""
    if name in OUTSIDE:
        return ()
    layers = _LAYERS.fullmatch(name)
    if layers is None:
        return None
    inner = layers[1]
    if WHOLE.fullmatch(inner) or BY_COLUMNS.fullmatch(inner):
        return ()
    if not BY_ROWS.fullmatch(inner):
        return None
    if ".linear_qkv." in inner:
        heads = int(arguments["num_attention_heads"])
        is_grouped = arguments.get("group_query_attention")
        groups = int(arguments["num_query_groups"]) if is_grouped else heads
        per_group = heads // groups + 2
        return groups, per_group, shape[1] // (groups * per_group)
    return (2, shape[1] // 2) if arguments.get("swiglu") else ()


def _apart(key: str, tensor: SavedTensor, dims: tuple[int, ...]) -> SavedTensor:
    """Dim 1 as several. Raises ValueError: a piece that is not of whole groups of heads, nor of gate or up alone."""
    if not dims:
        return tensor
    inner = 1
    for size in dims[1:]:
        inner *= size
    shards = []
    for box, byte_range in tensor.shards:
        first, stop = box[1]
        if len(dims) == 2 and first // inner == (stop - 1) // inner:
            # a tensor rank's part of the gate, or of up
            number = first // inner
            start = number * inner
            cut: Box = ((number, number + 1), (first - start, stop - start))
        elif first % inner == 0 and stop % inner == 0:
            cut = ((first // inner, stop // inner), *((0, size) for size in dims[1:]))
        else:
            raise ValueError(
                f"{key}: a piece has rows {first} to {stop} of parts of {inner}, and cuts one"
            )
        new_box = (box[0], *cut, *box[2:])
        shards.append((new_box, replace(byte_range, shape=extent(box))))
    return SavedTensor((tensor.shape[0], *dims, *tensor.shape[2:]), tensor.dtype, tuple(shards))
