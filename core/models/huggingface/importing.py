"""A folder of Hugging Face's as a checkpoint of ours: read tensor by tensor, the model is never in memory."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from warnings import warn

import torch
from torch import Tensor

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.grid import cell_of, cells, inner_shape
from core.dist_checkpointing.format.keys import path_of
from core.dist_checkpointing.format.zarr_metadata import Chunking, Json, array_metadata
from core.dist_checkpointing.publish.manifest import FORMAT
from core.dist_checkpointing.reading.read import memory_of, torch_dtype
from core.dist_checkpointing.tools.offline import check_new, write_offline
from core.dist_checkpointing.writing.job import Cells
from core.models.gpt.description import description_of
from core.models.gpt.gpt_model import GPTModel
from core.models.huggingface.families import HuggingFaceModel, from_huggingface
from core.models.huggingface.reading import OpenedWeights, open_weights
from core.models.huggingface.sources import Folder
from core.parallel_state import ParallelState

_FLOAT32 = ".e_score_correction_bias"
MODEL = "model/"  # where a run keeps its model in a checkpoint
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Imported:
    """What an import wrote: the model, how many arrays, how many bytes."""

    model: HuggingFaceModel
    arrays: int
    nbytes: int


def import_huggingface(
    folder: str | Path, checkpoint: str, progress: Callable[[int], None] = lambda nbytes: None
) -> Imported:
    """Write the model of `folder` as a checkpoint that any layout opens; committed whole, verified, or not at all.

    The arrays, their names and chunks are those that `dist_checkpointing.save({"model": ...})` of the model writes.
    progress: called with bytes written. Raises ValueError: as `from_huggingface` and `load_huggingface`; something
    is at `checkpoint` already.
    """
    check_new(checkpoint)
    source = Folder(folder)
    model_form = from_huggingface(folder, params_dtype=_dtype(source))
    # names, shapes and layouts, no memory
    with torch.device("meta"):
        model = GPTModel(**model_form.arguments(), parallel=ParallelState.single("cpu"), seed=0)
    # all names and shapes are compared here, before hours of copying
    weights = open_weights(model, source)
    weights.check_tied(model)
    infos = {path_of(shard.key): shard.info for shard in model.sharded_state_dict().values()}
    metadata: dict[str, Json] = {}
    for key, info in infos.items():
        cell = cell_of(info)
        metadata[key] = array_metadata(info, cell, inner_shape(cell))
    attributes = {"paracore": {"format": FORMAT, "objects": {}, "derived": {}}}
    # so that it can be exported, and continued, by itself
    model_description = description_of(**model_form.arguments())
    run = {
        "imported": {"from": "huggingface", "folder": Path(folder).name},
        "model": model_description,
        "time": time.time(),
    }
    nbytes = sum(prod(info.shape) * info.itemsize for info in infos.values())
    write_offline(
        checkpoint, metadata, attributes, run, nbytes, _cells(infos, metadata, weights, progress)
    )
    return Imported(model_form, len(infos), nbytes)


def _dtype(source: Folder) -> torch.dtype:
    """The dtype of most weights. transformers stores some in float32 beside them: GLM-4's routers.

    Raises ValueError: values that are stored otherwise, eight bits with scales for instance.
    """
    elements = Counter[str]()
    names = [name for name in source.names() if not name.endswith(_FLOAT32)]
    for name in names:
        elements[source.dtype(name)] += prod(source.shape(name))
    if others := sorted(elements.keys() - _DTYPES.keys()):
        raise ValueError(
            f"{source.folder} holds weights of {', '.join(others)}, {', '.join(_DTYPES)} are read; "
            "model.to(torch.bfloat16).save_pretrained(folder) writes them so"
        )
    most = max(elements, key=elements.__getitem__)
    dtype = _DTYPES[most]
    if rounded := [
        name for name in names if torch.promote_types(_DTYPES[source.dtype(name)], dtype) != dtype
    ]:
        warn(
            f"{len(rounded)} of {len(names)} weights of {source.folder} are rounded to {most}, as most are "
            f"({rounded[0]} is {source.dtype(rounded[0])}); a folder of which all are "
            f"{source.dtype(rounded[0])} is imported without rounding",
            stacklevel=3,
        )
    return dtype


def _cells(
    infos: Mapping[str, ArrayInfo],
    metadata: Mapping[str, Json],
    weights: OpenedWeights,
    done: Callable[[int], None],
) -> Cells:
    """Every cell of every array. In memory are one cell and the parameters that it is cut from."""
    for key, info in infos.items():
        parameters: dict[int, Tensor] = {}
        for index, box in cells(info.shape, Chunking.from_metadata(metadata[key]).cell):
            # of a stack the first dim is the layer
            layers, inner = (range(*box[0]), box[1:]) if info.stacked else (range(1), box)
            # cells come layer by layer, so earlier layers are needed no more
            parameters = {layer: tensor for layer, tensor in parameters.items() if layer in layers}
            for layer in layers:
                if layer not in parameters:
                    parameter = weights.parameter(_name(key, info, layer))
                    parameters[layer] = parameter.to(torch_dtype(info.dtype))
            part = tuple(slice(*interval) for interval in inner)
            cut = [parameters[layer][part] for layer in layers]
            if len(cut) > 1:
                values = torch.stack(cut)
            else:  # of one layer nothing is copied
                values = cut[0].unsqueeze(0) if info.stacked else cut[0]
            array = memory_of(values.contiguous())
            yield key, index, box, array
            done(array.nbytes)


def _name(key: str, array_info: ArrayInfo, row: int) -> str:
    """The parameter that lies in row `row` of a stacked array: its number stands behind the name of the stack."""
    name = key.removeprefix(MODEL)
    if not array_info.stacked:
        return name
    return f"{array_info.stack}.{array_info.layer_numbers[row]}{name[len(array_info.stack) :]}"
