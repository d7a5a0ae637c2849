"""`average`: the averaged weights that a run kept (`optimizer.ema_decay`) as a checkpoint of a model by itself.

What reads a model (`evaluate`, `generate`, `checkpoint.weights`, exports) reads it as any other.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.grid import cell_of, cells, inner_shape
from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.format.zarr_metadata import Chunking, Json, array_metadata
from core.dist_checkpointing.reading.lazy import LazyTensor, lazy_tensors
from core.dist_checkpointing.reading.read import memory_of
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.tools.export import MODEL, weights
from core.dist_checkpointing.tools.offline import write_offline
from core.dist_checkpointing.writing.job import Cells
from core.parallel_state.flat import Box, slices

AVERAGE = "optimizer/ema/"

# called with the number of bytes that were written
Done = Callable[[int], None]


def infos_of(stored: StoredCheckpoint) -> dict[str, ArrayInfo]:
    """Name in paths -> shape, dtype and grid of every parameter and buffer of the model, derived ones included."""
    return {
        name: replace(stored.info(origin), dtype=dtype)
        for name, (origin, dtype) in weights(stored).items()
    }


def averaged_bytes(stored: StoredCheckpoint) -> int:
    """Bytes of the model. Raises ValueError: the run kept no average."""
    if not any(key.startswith(AVERAGE) for key in stored.metadata):
        raise ValueError(
            f"{stored.directory.url} holds 0 arrays below {AVERAGE}: its run kept no average of the weights; train "
            "with optimizer.ema_decay = 0.999, say"
        )
    return sum(prod(info.shape) * info.itemsize for info in infos_of(stored).values())


def write_averaged(stored: StoredCheckpoint, url: str, done: Done) -> list[str]:
    """Write a checkpoint at `url`: the average of each parameter, in the weights' dtype, under the name of the model.

    Returns the names that have no average, frozen parameters and buffers, which are copied as they are. Memory stays
    bounded. Raises ValueError: something is at `url`, damage.
    """
    infos = infos_of(stored)
    tensors = lazy_tensors(stored.directory.address)
    metadata: dict[str, Json] = {}
    for name, info in infos.items():
        cell = cell_of(info)
        metadata[MODEL + name] = array_metadata(info, cell, inner_shape(cell))
    objects = {
        key: value for key, value in stored.objects.items() if not key.startswith("optimizer/")
    }
    attributes = {"paracore": {"format": stored.format, "objects": objects, "derived": {}}}
    run = {**stored.run, "averaged": stored.directory.url, "time": time.time()}
    write_offline(
        url,
        metadata,
        attributes,
        run,
        averaged_bytes(stored),
        _cells(infos, metadata, tensors, done),
    )
    return sorted(
        key_of(name)
        for name, info in infos.items()
        if not _has_average(key_of(name), info, tensors)
    )


def _cells(
    infos: Mapping[str, ArrayInfo],
    metadata: Mapping[str, Json],
    tensors: Mapping[str, LazyTensor],
    done: Done,
) -> Cells:
    for name, info in infos.items():
        path = MODEL + name
        for index, box in cells(info.shape, Chunking.from_metadata(metadata[path]).cell):
            values = memory_of(_values(key_of(name), info, box, tensors))
            yield path, index, box, values
            done(values.nbytes)


def _values(
    name: str, array_info: ArrayInfo, box: Box, tensors: Mapping[str, LazyTensor]
) -> Tensor:
    """What the averaged model has in a box of one of its arrays."""
    weight = tensors[MODEL + name]
    average = tensors.get(AVERAGE + name)
    if average is not None:
        return average[slices(box)].to(weight.dtype)
    if not array_info.stacked:
        return weight[slices(box)]
    # where some layers are frozen, each of the others has an average of its own
    rows = []
    for row_number in range(*box[0]):
        own = tensors.get(_layer_key(name, array_info, array_info.layer_numbers[row_number]))
        if own is None:
            row = weight[(row_number, *slices(box[1:]))]
        else:
            row = own[slices(box[1:])]
        rows.append(row.to(weight.dtype))
    return torch.stack(rows)


def _has_average(name: str, array_info: ArrayInfo, tensors: Mapping[str, LazyTensor]) -> bool:
    layers = array_info.layer_numbers if array_info.stacked else ()
    return AVERAGE + name in tensors or any(
        _layer_key(name, array_info, layer) in tensors for layer in layers
    )


def _layer_key(name: str, array_info: ArrayInfo, layer: int) -> str:
    """`decoder.layers` and `.norm.weight` -> `optimizer/ema/decoder.layers.7.norm.weight`."""
    return f"{AVERAGE}{array_info.stack}.{layer}{name.removeprefix(array_info.stack)}"
