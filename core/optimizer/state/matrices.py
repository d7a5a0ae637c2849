"""Weight matrices that are cut over ranks: where their parts lie, and who puts which of them together.

Two cuts may lie on top of each other. Tensor ranks hold rows or columns of a matrix (its `Layout`); ZeRO cuts the
flat form of what one of them holds over the data ranks. All of it is integers that every rank computes alike.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from core.data_parallel import Buffer
from core.optimizer.state.flat_shard import Span
from core.parallel_state.collectives import Group
from core.parallel_state.layout import Layout, layout_of
from core.parallel_state.state import ParallelState

# elements of full matrices that a rank puts together at a time, if they are not larger one by one
ROUND = 1 << 22


@dataclass(frozen=True, eq=False)
class Matrix:
    """One weight matrix of a parameter: as it is in full, and the part that this rank's bucket holds.

    name, layout: the parameter's. bucket_span: elements [start, stop) of the bucket, the part on all data ranks.
    part: its shape, padded rows included. full: the true shape of the full matrix, before all dims but the first are
    flattened (convolutions have more than two). cut: the dim of both that the ranks of `cut_over` cut, if any.
    """

    name: str
    layout: Layout
    buffer: Buffer
    bucket_span: Span
    part: tuple[int, ...]
    full: tuple[int, ...]
    cut: int | None = None
    cut_over: Group | None = None

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        """Of the full matrix."""
        return self.full[0], prod(self.full[1:])

    @property
    def data_ranks(self) -> Group | None:
        """The ranks over which ZeRO cuts the part; None: this rank updates all of it."""
        if self.buffer.stage == 0:
            return None
        return self.buffer.ranks

    def piece(self, data_rank: int) -> Span:
        """Elements of the bucket that `data_rank` updates of the part; empty if it has none."""
        start, stop = self.bucket_span
        if self.data_ranks is None:
            return start, stop
        first, last = self.buffer.bucket.cut(self.data_ranks.size, data_rank)
        start, stop = max(start, first), min(stop, last)
        return start, max(start, stop)

    def put_together(self, parts: Sequence[Tensor]) -> Tensor:
        """Flat parts of all ranks of `cut_over` -> the full matrix, [rows, columns]."""
        shaped = [part.view(self.part) for part in parts]
        full = shaped[0]
        if self.cut is not None:
            full = torch.cat(shaped, self.cut)
        return full[tuple(slice(0, size) for size in self.full)].flatten(1)

    def take_apart(self, matrix: Tensor) -> list[Tensor]:
        """The inverse of `put_together`; padded rows are 0."""
        full = matrix.reshape(self.full)
        ranks = 1
        if self.cut is not None and self.cut_over is not None:
            ranks = self.cut_over.size
        padded = [size * (ranks if dim == self.cut else 1) for dim, size in enumerate(self.part)]
        if padded != list(self.full):
            true = full
            full = full.new_zeros(padded)
            full[tuple(slice(0, size) for size in self.full)] = true
        if self.cut is None:
            return [full.flatten()]
        return [part.flatten() for part in full.chunk(ranks, self.cut)]


def matrices_of(
    buffers: Iterable[Buffer], names: Collection[str], as_one: Collection[str], ps: ParallelState
) -> list[Matrix]:
    """The matrices of the parameters `names`: the last two dims, stack by stack; of `as_one` all dims are one.

    The same list on all ranks that share them. Raises ValueError: a matrix cut over two axes of the mesh.
    """
    matrices = []
    for buffer in buffers:
        for slot, parameter in zip(buffer.bucket.slots, buffer.parameters, strict=True):
            if slot.name not in names:
                continue
            layout = layout_of(parameter)
            if slot.name in as_one:
                stacked = 0
            else:
                stacked = len(layout.shape) - 2
            axis = _cutting_axis(slot.name, layout, stacked, ps)
            cut = None
            cut_over = None
            if axis is not None:
                cut = layout.split[axis] - stacked
                cut_over = ps.group(axis)
            part = tuple(parameter.shape[stacked:])
            full = layout.shape[stacked:]
            size = prod(part)
            for number in range(prod(parameter.shape[:stacked])):
                start = slot.start + number * size
                span = start, start + size
                matrix = Matrix(slot.name, layout, buffer, span, part, full, cut, cut_over)
                matrices.append(matrix)
    return matrices


def _cutting_axis(name: str, layout: Layout, stacked: int, ps: ParallelState) -> str | None:
    """The axis whose ranks hold parts of a matrix."""
    axes = [axis for axis, dim in layout.split.items() if dim >= stacked and ps.size(axis) > 1]
    if len(axes) > 1:
        raise ValueError(
            f"{name}: its matrices of {layout.shape} are cut over {len(axes)} axes ({', '.join(axes)}), at most 1 is "
            "put together; split one of these dims, or leave the parameter to AdamW (hidden=...)"
        )
    return axes[0] if axes else None


@dataclass(frozen=True, eq=False)
class MatrixRound:
    """Matrices that are put together at the same time, and their owners: ranks of `data_ranks` and `cut_over`."""

    matrices: tuple[Matrix, ...]
    data_owners: tuple[int, ...]
    part_owners: tuple[int, ...]

    @property
    def data_ranks(self) -> Group | None:
        """Over which their parts are cut."""
        return self.matrices[0].data_ranks

    @property
    def cut_over(self) -> Group | None:
        """Who holds the parts."""
        return self.matrices[0].cut_over


def plan_rounds(matrices: Sequence[Matrix], most: int = ROUND) -> list[MatrixRound]:
    """Rounds in an order that all ranks share, so that none waits for another that is elsewhere.

    In a round a rank owns at most twice max(most, the largest matrix) elements.
    """
    same_way: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in matrices:
        same_way.setdefault((id(matrix.data_ranks), id(matrix.cut_over)), []).append(matrix)
    rounds = []
    for members in same_way.values():
        data_size, cut_size = _size(members[0].data_ranks), _size(members[0].cut_over)
        sizes = [prod(matrix.full) for matrix in members]
        for first, last in in_rounds(sizes, data_size * cut_size, most):
            owners = balanced_owners(sizes[first:last], data_size * cut_size)
            data_owners, part_owners = zip(
                *(divmod(owner, cut_size) for owner in owners), strict=True
            )
            rounds.append(MatrixRound(tuple(members[first:last]), data_owners, part_owners))
    return rounds


def _size(group: Group | None) -> int:
    return 1 if group is None else group.size


def in_rounds(sizes: Sequence[int], ranks: int, most: int) -> list[Span]:
    """Consecutive items [first, last) of at most `ranks` times max(most, their largest) together."""
    rounds = []
    first = 0
    total = 0
    largest = most
    for number, size in enumerate(sizes):
        if number > first and total + size > ranks * max(largest, size):
            rounds.append((first, number))
            first = number
            total = 0
            largest = most
        total = total + size
        largest = max(largest, size)
    if sizes:
        rounds.append((first, len(sizes)))
    return rounds


def balanced_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """A rank for each item: the largest first, each to who has least so far, the first of several."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners
