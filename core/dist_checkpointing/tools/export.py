"""`export` and `reshard --per-rank`: the model's weights for other programs, one tensor per parameter and layer."""

import re
from collections.abc import Callable
from itertools import product
from os import PathLike

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.planning.cuts import cuts
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.storage.checkpoint_dir import open_dir, space_for
from core.dist_checkpointing.tools.safetensors_files import (
    FILE_BYTES,
    ExportedTensor,
    new_folder,
    write,
)
from core.parallel_state.flat import Box, extent

MODEL = "model/"
DTYPES = {"as-saved": None, "bf16": "bfloat16", "fp32": "float32"}

# called with the number of bytes that were written
Done = Callable[[int], None]


def weights(stored: StoredCheckpoint) -> dict[str, tuple[str, str]]:
    """name -> (stored array, dtype) of every parameter and buffer of the model; those derived included.

    Raises ValueError: no model, a derived array without its source.
    """
    # 16-bit weights that were left out of the checkpoint are the main weights rounded
    origins = {key: (key, stored.dtype(key)) for key in stored.keys}
    for key, recipe in stored.derived.items():
        origins[key] = recipe["from"], recipe["torch_dtype"]
    lost = sorted(key for key, _ in origins.values() if key not in stored.metadata)
    if lost:
        raise ValueError(
            f"{stored.directory.url} derives from {lost[0]}, which it does not hold; use another step"
        )
    names = {
        key.removeprefix(MODEL): origins[key] for key in sorted(origins) if key.startswith(MODEL)
    }
    if not names:
        raise ValueError(
            f"{stored.directory.url} holds no array below {MODEL}, so no model; `inspect` lists what it holds"
        )
    return names


def tensors(
    stored: StoredCheckpoint,
    dtype: str | None = None,
    *,
    tp: tuple[int, int] = (0, 1),
    pp: tuple[int, int] = (0, 1),
) -> list[ExportedTensor]:
    """The tensors that a rank holds, (rank, size) along tensor and pipeline axes; by default the full model.

    Layers of a stack are apart, with their numbers in the full model.
    """
    (tp_rank, tp_size) = tp
    (pp_rank, pp_size) = pp
    exported = []
    for name, (key, saved_dtype) in weights(stored).items():
        info = stored.info(key)
        if not info.stacked and pp_rank != _pipeline_stage(name, pp_size):
            continue
        intervals_by_dim = cuts(info, tp_size, pp_size)
        # the box of this rank: its tensor-parallel cut, and the layers of its pipeline stage
        box = [intervals[0] for intervals in intervals_by_dim]
        if info.cut_dim is not None:
            box[info.cut_dim] = intervals_by_dim[info.cut_dim][tp_rank]
        if info.stacked:
            box[0] = intervals_by_dim[0][pp_rank]
        # integers and booleans stay as they are
        if dtype is not None and "float" in saved_dtype:
            exported_dtype = dtype
        else:
            exported_dtype = saved_dtype
        for layer_name, layer_box in _layers(name, tuple(box), info):
            is_layer = layer_name != name
            shape = extent(layer_box[1:] if is_layer else layer_box)
            exported.append(
                ExportedTensor(key_of(layer_name), shape, exported_dtype, key, layer_box)
            )
    return exported


def _layers(name: str, box: Box, array_info: ArrayInfo) -> list[tuple[str, Box]]:
    """(name, box) of each layer: the number goes behind the name of the stack.

    A stack without a name is what stands up to `layers`, as in Megatron's names; without that the stack stays one
    tensor.
    """
    stack = array_info.stack
    if not stack and (match := re.match(r"(.*\.)?layers(?=\.)", name)):
        stack = match[0]
    if not array_info.stacked or not stack:
        return [(name, box)]
    # `decoder.layers` and `.norm.weight` -> `decoder.layers.7.norm.weight`
    suffix = name[len(stack) :]
    numbers = array_info.layer_numbers
    return [
        (f"{stack}.{numbers[row]}{suffix}", ((row, row + 1), *box[1:])) for row in range(*box[0])
    ]


def _pipeline_stage(name: str, stages: int) -> int:
    """The stage of a parameter outside of the layers: embeddings the first, what follows the layers the last."""
    if "embedding" in name:
        return 0
    return stages - 1


def export(
    stored: StoredCheckpoint,
    folder: str | PathLike[str],
    dtype: str | None,
    done: Done,
    file_bytes: int = FILE_BYTES,
) -> list[ExportedTensor]:
    """The full model in safetensors files, streamed; returns what was written."""
    exported = tensors(stored, dtype)
    total = sum(tensor.nbytes for tensor in exported)
    with new_folder(folder) as temporary, space_for(open_dir(temporary), total):
        write(stored, exported, temporary, done, file_bytes)
    return exported


def per_rank(
    stored: StoredCheckpoint,
    folder: str | PathLike[str],
    tp: int,
    pp: int,
    done: Done,
    file_bytes: int = FILE_BYTES,
) -> dict[str, list[ExportedTensor]]:
    """A directory for each rank, named as Megatron's, with its shard of the model; returns what was written."""
    tensors_by_rank = {}
    for pp_rank, tp_rank in product(range(pp), range(tp)):
        name = f"mp_rank_{tp_rank:02d}"
        if pp > 1:
            name += f"_{pp_rank:03d}"
        tensors_by_rank[name] = tensors(stored, tp=(tp_rank, tp), pp=(pp_rank, pp))
    total = 0
    for rank_tensors in tensors_by_rank.values():
        total += sum(tensor.nbytes for tensor in rank_tensors)
    with new_folder(folder) as temporary, space_for(open_dir(temporary), total):
        for name, rank_tensors in tensors_by_rank.items():
            (temporary / name).mkdir()
            write(stored, rank_tensors, temporary / name, done, file_bytes)
    return tensors_by_rank
