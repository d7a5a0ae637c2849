"""Where offloaded states live: host memory, or files mapped into it."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.parallel_state.config import raise_all
from core.parallel_state.flat import PART_ALIGN

OFFLOAD_KINDS = ("cpu", "disk")


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Main weights and moments of a fraction of each buffer live in host memory ("cpu") or in files ("disk").

    fraction: of each buffer's elements on this rank. directory: of the files; one per state and rank, without a name
    once it is mapped, so that nothing is left behind however the process ends.
    Raises ValueError: an unknown kind, a fraction outside [0, 1], "disk" without a directory.
    """

    kind: str = "cpu"
    fraction: float = 1.0
    directory: str | Path | None = None

    def __post_init__(self) -> None:
        raise_all("Offload", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.kind in OFFLOAD_KINDS,
            f"kind={self.kind!r} is unknown; known: {', '.join(OFFLOAD_KINDS)}",
        )
        yield (
            0 <= self.fraction <= 1,
            f"fraction={self.fraction} must be between 0 (all beside the weights) and 1 (all offloaded)",
        )
        if self.kind == "disk":
            yield self.directory is not None, "kind='disk' needs a directory for its files"

    def cut(self, size: int) -> int:
        """How many of a buffer's first elements are offloaded: a multiple of `PART_ALIGN`, or all."""
        if self.fraction == 1:
            return size
        return int(size * self.fraction) // PART_ALIGN * PART_ALIGN

    def allocate(self, size: int, dtype: torch.dtype, name: str, *, pinned: bool) -> Tensor:
        """[size] zeros. Raises OSError: the disk has no room."""
        if self.kind == "disk" and size:
            assert self.directory is not None
            return _map_file(Path(self.directory), size, dtype, name)
        return torch.zeros(size, dtype=dtype, pin_memory=pinned)


def _map_file(directory: Path, size: int, dtype: torch.dtype, name: str) -> Tensor:
    """[size] zeros in a new file that has no name any more: the mapping keeps it until the process ends."""
    directory.mkdir(parents=True, exist_ok=True)
    file, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".states", dir=directory)
    try:
        # a full disk says so here, and not by a signal later
        os.posix_fallocate(file, 0, size * dtype.itemsize)
        return torch.from_file(path, shared=True, size=size, dtype=dtype)
    finally:
        os.close(file)
        os.unlink(path)
