"""Tensors of a checkpoint that are read when they are asked for, whole or in part; every rank by itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index as integer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.dist_checkpointing.keys import key_of
from core.dist_checkpointing.loading import opened
from core.dist_checkpointing.read import read, torch_dtype
from core.dist_checkpointing.stored import Stored
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
        dims = _dims(index if isinstance(index, tuple) else (index,), self.shape)
        box = tuple((start, stop) for start, stop, _ in dims)
        made = torch.empty(extent(box), dtype=self.dtype)
        if made.numel():
            read(self._stored, {self._path: [(box, made)]})
        return made[tuple(0 if single else slice(None) for _, _, single in dims)]


def _dims(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    """Of each dim: start, stop, whether it falls away."""
    if (dots := [at for at, part in enumerate(index) if part is Ellipsis]) and len(dots) == 1:
        missing = len(shape) - len(index) + 1
        index = (*index[: dots[0]], *[slice(None)] * missing, *index[dots[0] + 1 :])
    if len(index) > len(shape) or any(part is Ellipsis for part in index):
        raise IndexError(f"{index} has too many parts for a tensor of shape {list(shape)}")
    found = []
    for part, n in zip((*index, *[slice(None)] * (len(shape) - len(index))), shape, strict=True):
        if isinstance(part, slice):
            start, stop, step = part.indices(n)
            if step != 1:
                raise IndexError(f"{part}: only steps of 1 are read; read the range and step through it")
            found.append((start, max(start, stop), False))
            continue
        at = integer(part)
        if not -n <= at < n:
            raise IndexError(f"{at} is out of range for a dim of {n} of shape {list(shape)}")
        found.append((at % n, at % n + 1, True))
    return found


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
