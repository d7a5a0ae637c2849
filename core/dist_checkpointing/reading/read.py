"""From cells on disk into live memory, under a byte budget: each cell's file is opened for what is needed of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.format.arrays import Index
from core.dist_checkpointing.format.grid import cells
from core.dist_checkpointing.reading.direct import DirectReader, fastest_reader
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.storage.zarr_store import Reader
from core.parallel_state.flat import Box, extent, intersect, relative, slices, volume

BUDGET = 64 << 20  # bytes in flight, and bytes staged
# a box of the full array, and the memory of exactly that shape that it goes to
Target = tuple[Box, Tensor]


@dataclass
class Staged:
    """A box that is read into memory of its own: to be converted, copied to several targets, or sent to a rank."""

    box: Box
    array: np.ndarray
    dtype: torch.dtype
    targets: list[Target] = field(default_factory=list)

    @property
    def data(self) -> Tensor:
        """The elements of `box`."""
        return torch.from_numpy(self.array).view(self.dtype)

    def copy_to_targets(self) -> None:
        """Copy what was read into every target, each of which lies in `box`."""
        for box, target in self.targets:
            target.copy_(self.data[slices(relative(box, self.box))])


def read(
    stored: StoredCheckpoint, requested: Mapping[str, Sequence[Target]], *, verify: bool = True
) -> None:
    """Fill every target from the stored array of its key; the values of other dtypes are converted.

    Reads only the inner chunks that are needed; what is staged stays below 64 MiB. `verify`: every file touched must
    be the one that the manifest names (a few bytes each); the checksum behind every chunk is always checked.
    Raises ValueError: what is damaged, by file.
    """
    files = stored.manifest.files if verify else None
    reader = fastest_reader(stored.directory, stored.metadata, files, budget_bytes=BUDGET)
    staged: list[Staged] = []
    staged_bytes = 0
    # the direct reader checks files while it reads them; tensorstore's does not see the bytes that tell
    with stored.checker(enabled=verify and isinstance(reader, Reader)) as checker:
        for key, targets in requested.items():
            dtype = torch_dtype(stored.dtype(key))
            for index, cell_targets in by_cell(stored, key, targets).items():
                checker.add(key, index)
                for one_read in _reads_of_cell(cell_targets, dtype):
                    if isinstance(one_read, Staged):
                        staged.append(one_read)
                        staged_bytes += one_read.array.nbytes
                        reader.read(key, one_read.box, one_read.array)
                    else:
                        box, target = one_read
                        reader.read(key, box, memory_of(target))
                    if staged_bytes > BUDGET:
                        _finish_staged(reader, staged)
                        staged_bytes = 0
        _finish_staged(reader, staged)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch's name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"dtype {name!r} is unknown to torch {torch.__version__}; install a newer one"
        )
    return dtype


def _finish_staged(reader: Reader | DirectReader, staged: list[Staged]) -> None:
    """Wait for all reads, copy what was staged, and free its memory."""
    reader.finish()
    for one_read in staged:
        one_read.copy_to_targets()
    staged.clear()


def by_cell(
    stored: StoredCheckpoint, key: str, targets: Sequence[Target]
) -> dict[Index, list[Target]]:
    """index -> the targets cut to that cell."""
    shape = stored.shape(key)
    cell_shape = stored.cell(key)
    targets_by_cell: dict[Index, list[Target]] = {}
    for box, target in targets:
        for index, cell in cells(shape, cell_shape, box):
            overlap = intersect(box, cell)
            assert overlap is not None
            target_part = target[slices(relative(overlap, box))]
            targets_by_cell.setdefault(index, []).append((overlap, target_part))
    return targets_by_cell


def _reads_of_cell(targets: list[Target], dtype: torch.dtype) -> list[Target | Staged]:
    """How to read one cell: straight into memory where that is possible, once for targets that lie close together.

    Layers of a small stack share a cell: one read of what they span, unless that is more than twice what they need.
    """
    # several targets: read what they span at once, if it is little more than they need
    if len(targets) > 1:
        spans = []
        for intervals in zip(*(box for box, _ in targets), strict=True):
            starts, stops = zip(*intervals, strict=True)
            spans.append((min(starts), max(stops)))
        bounds: Box = tuple(spans)
        if volume(bounds) <= 2 * sum(volume(box) for box, _ in targets):
            return [stage(bounds, dtype, targets)]
    # else one by one; another dtype, or another device, needs memory beside the target
    reads: list[Target | Staged] = []
    for box, target in targets:
        if target.device.type == "cpu" and target.dtype == dtype:
            reads.append((box, target))
        else:
            reads.append(stage(box, dtype, [(box, target)]))
    return reads


def stage(box: Box, dtype: torch.dtype, targets: list[Target]) -> Staged:
    """Memory to read a box into, for targets inside of it."""
    return Staged(box, memory_of(torch.empty(extent(box), dtype=dtype)), dtype, targets)


def memory_of(tensor: Tensor) -> np.ndarray:
    """A CPU tensor's memory as numpy; what numpy cannot name as its bits."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elif tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        tensor = tensor.view(torch.uint8)
    return tensor.detach().numpy()
