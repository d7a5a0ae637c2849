"""From cells on disk into live memory, under a byte budget: each cell's file is opened for what is needed of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.format.arrays import Index
from core.dist_checkpointing.format.grid import cells
from core.dist_checkpointing.reading.direct import fastest_reader
from core.dist_checkpointing.reading.stored import Stored
from core.dist_checkpointing.storage.zarr_store import Reader
from core.parallel_state.flat import Box, extent, intersect, relative, slices, volume

BUDGET = 64 << 20  # bytes in flight, and bytes staged
Target = tuple[Box, Tensor]  # a box of the whole array, and the memory of exactly that shape that it goes to


@dataclass
class Staged:
    """Bytes read beside their place: to be converted, spread over several places, or sent to a device or a rank."""

    box: Box
    array: np.ndarray
    dtype: torch.dtype
    targets: list[Target] = field(default_factory=list)

    @property
    def data(self) -> Tensor:
        """The elements of `box`."""
        return torch.from_numpy(self.array).view(self.dtype)

    def give_out(self) -> None:
        """Copy what was read into every target that lies in it."""
        for box, target in self.targets:
            target.copy_(self.data[slices(relative(box, self.box))])


def read(stored: Stored, wanted: Mapping[str, Sequence[Target]], *, verify: bool = True) -> None:
    """Fill every target from the stored array of its key; the values of other dtypes are converted.

    Reads only the pieces of cells that are needed; what is staged stays below 64 MiB. `verify`: every file touched
    must be the one that the manifest names (a few bytes each); the checksum behind every piece is always checked.
    Raises ValueError: what is damaged, by file.
    """
    files = stored.manifest.files if verify else None
    reader = fastest_reader(stored.place, stored.metadata, files, budget_bytes=BUDGET)
    staged: list[Staged] = []
    size = 0
    with stored.checker(enabled=verify and isinstance(reader, Reader)) as checker:
        for key, targets in wanted.items():
            dtype = torch_dtype(stored.dtype(key))
            for index, parts in by_cell(stored, key, targets).items():
                checker.add(key, index)
                for piece in _pieces(parts, dtype):
                    if isinstance(piece, Staged):
                        staged.append(piece)
                        size += piece.array.nbytes
                        reader.read(key, piece.box, piece.array)
                    else:
                        reader.read(key, piece[0], memory_of(piece[1]))
                    if size > BUDGET:
                        reader.finish()
                        _give_out(staged)
                        size = 0
        reader.finish()
        _give_out(staged)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch's name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name!r} is unknown to torch {torch.__version__}; install a newer one")
    return found


def _give_out(staged: list[Staged]) -> None:
    for piece in staged:
        piece.give_out()
    staged.clear()


def by_cell(stored: Stored, key: str, targets: Sequence[Target]) -> dict[Index, list[Target]]:
    """index -> the parts of the targets inside that cell."""
    shape, cell = stored.shape(key), stored.cell(key)
    found: dict[Index, list[Target]] = {}
    for box, target in targets:
        for index, held in cells(shape, cell, box):
            both = intersect(box, held)
            assert both is not None
            found.setdefault(index, []).append((both, target[slices(relative(both, box))]))
    return found


def _pieces(parts: list[Target], dtype: torch.dtype) -> list[Target | Staged]:
    """How to read one cell: straight into memory where that is possible, once for parts that lie close together.

    Layers of a small stack share a cell: one read of what they span, unless that is more than twice what they need.
    """
    if len(parts) > 1:
        bounds = tuple(
            (min(a for a, _ in dim), max(b for _, b in dim)) for dim in zip(*(b for b, _ in parts), strict=True)
        )
        if volume(bounds) <= 2 * sum(volume(box) for box, _ in parts):
            return [stage(bounds, dtype, parts)]
    return [
        part if part[1].device.type == "cpu" and part[1].dtype == dtype else stage(part[0], dtype, [part])
        for part in parts
    ]


def stage(box: Box, dtype: torch.dtype, targets: list[Target]) -> Staged:
    """Memory to read a box into, for targets inside of it."""
    return Staged(box, memory_of(torch.empty(extent(box), dtype=dtype)), dtype, targets)


def memory_of(tensor: Tensor) -> np.ndarray:
    """A CPU tensor's memory as numpy; what numpy cannot name as its bits."""
    if tensor.dtype in (torch.bfloat16,):
        tensor = tensor.view(torch.uint16)
    elif tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        tensor = tensor.view(torch.uint8)
    return tensor.detach().numpy()
