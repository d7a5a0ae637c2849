"""Tensors of a checkpoint that are read when they are asked for, whole or in part; every rank by itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.reading.loading import open_stored
from core.dist_checkpointing.reading.read import read, torch_dtype
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.reading.stream import stream
from core.dist_checkpointing.state.assembly import index_dims
from core.parallel_state.flat import extent, whole


@dataclass(frozen=True)
class LazyTensor:
    """One global tensor: `t[2, 10:20]` is read from the cells that hold it, `t[...]` is all of it.

    dtype: what it is read as; of a derived array, the rounded one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    _stored: StoredCheckpoint
    _path: str

    def __getitem__(self, index: Any) -> Tensor:
        """Integers, slices of step 1 and `...`, as of tensors; new memory on the host.

        Raises ValueError: damage, by file. IndexError, TypeError: another index.
        """
        dims = index_dims(index if isinstance(index, tuple) else (index,), self.shape)
        box = tuple((start, stop) for start, stop, _ in dims)
        data = torch.empty(extent(box), dtype=self.dtype)
        if data.numel():
            read(self._stored, {self._path: [(box, data)]})
        # dims that were indexed by an integer fall away
        return data[tuple(0 if single else slice(None) for _, _, single in dims)]


def lazy_tensors(checkpoint_dir: str | Path) -> Mapping[str, LazyTensor]:
    """key -> tensor that costs no memory before it is asked for; derived arrays (16-bit weights) included.

    Raises DamagedCheckpoint, FileNotFoundError: as `load`.
    """
    stored = open_stored(checkpoint_dir)
    # key -> (the array that it is read from, the dtype that it is read as)
    origins = {key: (key, stored.dtype(key)) for key in stored.metadata}
    for key, recipe in stored.derived.items():
        origins[key] = recipe["from"], recipe["torch_dtype"]
    tensors = {}
    for key in sorted(origins):
        path, dtype = origins[key]
        tensors[key_of(key)] = LazyTensor(stored.shape(path), torch_dtype(dtype), stored, path)
    return tensors


def read_in_order(parts: Sequence[tuple[LazyTensor, int | None]]) -> Iterator[Tensor]:
    """Each tensor of one checkpoint, or a layer of it; the next ones are read while one is used.

    A tensor holds its values until the next one is asked for.
    Raises ValueError: damage, by file; some of it is known at the end, so exhaust the iterator.
    """
    if not parts:
        return
    stored = parts[0][0]._stored
    requests = []
    for tensor, layer in parts:
        box = whole(stored.shape(tensor._path))
        requests.append((tensor._path, box if layer is None else ((layer, layer + 1), *box[1:])))
    arrays = stream(stored, requests, reuse_memory=True)
    for part in parts:
        # nothing here holds it while the next one is read
        yield _as_tensor(next(arrays), *part)
    for _ in arrays:
        raise AssertionError("more was read than asked for")


def _as_tensor(array: np.ndarray, tensor: LazyTensor, layer: int | None) -> Tensor:
    """Stored values as they are asked for."""
    values = torch.from_numpy(array[0] if layer is not None else array)
    stored_dtype = torch_dtype(tensor._stored.dtype(tensor._path))
    # calls of torch let go of the interpreter's lock, for which the readers wait
    if values.dtype != stored_dtype:
        values = values.view(stored_dtype)
    if stored_dtype == tensor.dtype:
        return values
    return values.to(tensor.dtype)
