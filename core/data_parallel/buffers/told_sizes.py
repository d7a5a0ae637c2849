"""Sizes and row numbers of a gradient that lies in buckets, which a program may take for those of the whole."""

from typing import Any

import torch
from torch import Tensor


class ToldSizes(Tensor):
    """They are the parameter's: of a rank's part, and whoever listens to the gradient hears that they are read."""

    def hear(self, function: str, result: Any) -> None:
        """A method or a property of torch's was asked for, and gave `result`."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        """As torch's."""
        return self._heard("shape", super().shape)

    def size(self, *dim: Any) -> Any:
        """As torch's."""
        return self._heard("size", super().size(*dim))

    def numel(self) -> int:
        """As torch's."""
        return self._heard("numel", super().numel())

    def __getitem__(self, index: Any) -> Tensor:
        self._hear_rows("__getitem__", index)
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._hear_rows("__setitem__", index)
        super().__setitem__(index, value)

    def _hear_rows(self, function: str, index: Any) -> None:
        """torch calls nothing for a slice that takes all rows which are here: `[:90]` of 64."""
        items = index if isinstance(index, tuple) else (index,)
        if any(isinstance(item, slice) and item.stop is not None for item in items):
            self.hear(function, None)

    def _heard(self, function: str, size: Any) -> Any:
        self.hear(function, size)
        return size
