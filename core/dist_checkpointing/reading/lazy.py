"""Tensors of a checkpoint that are read when they are asked for, whole or in part; every rank by itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.reading.loading import opened
from core.dist_checkpointing.reading.read import read, torch_dtype
from core.dist_checkpointing.reading.stored import Stored
from core.dist_checkpointing.state.assembly import index_dims
from core.parallel_state.flat import extent


@dataclass(frozen=True)
class LazyTensor:
    """One global tensor: `t[2, 10:20]` is read from the cells that hold it, `t[...]` is all of it.

    dtype: what it is read as; of a derived array, the rounded one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    _stored: Stored
    _path: str

    def __getitem__(self, index: Any) -> Tensor:
        """Integers, slices of step 1 and `...`, as of tensors; new memory on the host.

        Raises ValueError: damage, by file. IndexError, TypeError: another index.
        """
        dims = index_dims(index if isinstance(index, tuple) else (index,), self.shape)
        box = tuple((start, stop) for start, stop, _ in dims)
        made = torch.empty(extent(box), dtype=self.dtype)
        if made.numel():
            read(self._stored, {self._path: [(box, made)]})
        return made[tuple(0 if single else slice(None) for _, _, single in dims)]


def lazy_tensors(checkpoint_dir: str | Path) -> Mapping[str, LazyTensor]:
    """key -> tensor that costs no memory before it is asked for; derived arrays (16-bit weights) included.

    Raises DamagedCheckpoint, FileNotFoundError: as `load`.
    """
    stored = opened(checkpoint_dir)
    found = {key: (key, stored.dtype(key)) for key in stored.metadata}
    found |= {key: (how["from"], how["torch_dtype"]) for key, how in stored.derived.items()}
    return {
        key_of(key): LazyTensor(stored.shape(path), torch_dtype(dtype), stored, path)
        for key, (path, dtype) in sorted(found.items())
    }
