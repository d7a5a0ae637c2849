"""Sums over rows and columns of a matrix of which a rank holds an interval: where its elements lie in the whole."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import Parameter

from core.optimizer.state.flat_shard import Span
from core.parallel_state.layout import Layout, has_layout, layout_of
from core.parallel_state.state import ParallelState


@dataclass(frozen=True, eq=False)
class FactoredMatrix:
    """A parameter as the matrices [stack, rows, columns] that it is, and the part of them that this rank holds.

    first_dim: the first dim that counts as rows; those before it are a stack, of which a rank holds `stack` matrices.
    rows, columns: of the full matrices. held_rows, held_columns: of the local part, padding included. row_places
    [held_rows] and column_places [held_columns]: their numbers in the full matrix; of padding 0. true_rows and
    true_columns: those that are no padding.
    """

    name: str
    layout: Layout
    first_dim: int
    stack: int
    rows: int
    columns: int
    held_rows: int
    held_columns: int
    row_places: Tensor
    column_places: Tensor
    true_rows: Tensor
    true_columns: Tensor

    @classmethod
    def of(cls, name: str, parameter: Parameter, ps: ParallelState) -> "FactoredMatrix":
        """Columns are the last dim. Parameters of ours are linears' [out, in], whatever dims out has, and experts a
        stack of them; of others the last two dims are a matrix, as in torch."""
        layout = layout_of(parameter)
        first_dim = 0
        if not has_layout(parameter):
            first_dim = len(layout.shape) - 2
        elif "ep" in layout.split:
            first_dim = layout.split["ep"] + 1
        local = tuple(parameter.shape)
        row_places, column_places = _places(layout, ps, first_dim)
        return cls(
            name,
            layout,
            first_dim,
            prod(local[:first_dim]),
            prod(layout.shape[first_dim:-1]),
            layout.shape[-1],
            prod(local[first_dim:-1]),
            local[-1],
            row_places.clamp(min=0),
            column_places.clamp(min=0),
            # numbers, because a mask would be waited for at each step
            (row_places >= 0).nonzero().flatten(),
            (column_places >= 0).nonzero().flatten(),
        )

    def shard_layout(self, length: int) -> Layout:
        """Of `length` numbers for each matrix of the stack, which is cut as the parameter's; they are not."""
        split = {axis: 0 for axis, dim in self.layout.split.items() if dim < self.first_dim}
        stack = (prod(self.layout.shape[: self.first_dim]),) if self.first_dim else ()
        return Layout((*stack, length), split, self.layout.partial & {"embedding"})

    def sums(self, squares: Tensor, interval: Span) -> tuple[Tensor, Tensor]:
        """squares [n] of the elements `interval` of the flat part -> their sums [stack, rows], [stack, columns]."""
        first, last = self._whole_rows(interval)
        padded = squares.new_zeros((last - first) * self.held_columns)
        start = interval[0] - first * self.held_columns
        padded[start : start + squares.numel()] = squares
        by_row = squares.new_zeros(self.stack * self.held_rows)
        by_row[first:last] = padded.view(-1, self.held_columns).sum(1)
        row_sums = squares.new_zeros(self.stack, self.rows)
        places = self.row_places[self.true_rows]
        row_sums[:, places] = by_row.view(self.stack, -1)[:, self.true_rows]
        # columns, of each matrix of the stack that the interval touches
        column_sums = squares.new_zeros(self.stack, self.columns)
        places = self.column_places[self.true_columns]
        for number in range(first // self.held_rows, -(-last // self.held_rows)):
            begin = max(first, number * self.held_rows) - first
            end = min(last, (number + 1) * self.held_rows) - first
            in_matrix = padded.view(-1, self.held_columns)[begin:end].sum(0)
            column_sums[number, places] = in_matrix[self.true_columns]
        return row_sums, column_sums

    def spread(self, by_row: Tensor, by_column: Tensor, interval: Span) -> Tensor:
        """by_row [stack, rows], by_column [stack, columns] -> [n] products for the elements `interval`.

        Padding has any.
        """
        first, last = self._whole_rows(interval)
        numbers = torch.arange(first, last, device=by_row.device)
        matrix = numbers // self.held_rows
        rows = self.row_places[numbers % self.held_rows]
        columns = by_column[:, self.column_places]
        product = columns[matrix].mul_(by_row[matrix, rows].unsqueeze(1))
        start = interval[0] - first * self.held_columns
        return product.flatten()[start : start + interval[1] - interval[0]]

    def _whole_rows(self, interval: Span) -> Span:
        """Rows [first, last) of the local part, counted through the stack, in which the interval lies."""
        return interval[0] // self.held_columns, -(-interval[1] // self.held_columns)


def _places(layout: Layout, ps: ParallelState, first_dim: int) -> tuple[Tensor, Tensor]:
    """Numbers in the full matrix of the rows and columns that this rank holds; -1 of padding."""
    box = layout.box(ps.coordinate, ps.sizes)
    local = layout.local_shape(ps.sizes)
    rows = torch.zeros(1, dtype=torch.long, device=ps.device)
    for dim in range(first_dim, len(local)):
        # several dims are one number, as in the flat form; the last dim is by itself
        here = box[dim].start + torch.arange(local[dim], device=ps.device)
        here = torch.where(here < box[dim].stop, here, -1)
        if dim == len(local) - 1:
            return rows, here
        padding = (rows.unsqueeze(1) < 0) | (here < 0)
        rows = (rows.unsqueeze(1) * layout.shape[dim] + here).masked_fill(padding, -1).flatten()
    raise ValueError(
        f"a shape of {len(local)} dims has no matrix; dims from {first_dim} on are needed"
    )
