"""Initial values that do not depend on the layout: drawn in blocks of whole rows, seeded by name and block."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from core.parallel_state.layout import Layout, layout_of, true_part
from core.parallel_state.random import mix32

# elements of one block: the unit of drawing, whatever the layout
DRAW_BLOCK = 1 << 20


@dataclass(frozen=True)
class Init:
    """Normal with `mean` and `std`; std 0 is a constant, and padded rows are always 0.

    bound: where it is given, uniform in `mean` +- `bound` instead.
    """

    std: float = 0.0
    mean: float = 0.0
    bound: float = 0.0

    @property
    def is_constant(self) -> bool:
        """Whether nothing is drawn."""
        return self.std == 0.0 and self.bound == 0.0

    def drawn(
        self, shape: tuple[int, ...], device: torch.device, generator: torch.Generator
    ) -> Tensor:
        """float32 values of that shape."""
        options: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
        if self.bound:
            return torch.rand(shape, **options).mul_(2 * self.bound).add_(self.mean - self.bound)
        return torch.randn(shape, **options).mul_(self.std).add_(self.mean)


def initialize_parameters(
    module: nn.Module,
    *,
    seed: int,
    coordinate: Mapping[str, int],
    sizes: Mapping[str, int],
    draw_on_cpu: bool = True,
) -> None:
    """Fill every parameter that carries an `Init` with its shard of the full tensor's initial values; not on meta.

    Each rank draws only the blocks that touch its shard. With `draw_on_cpu` the values are the same on every
    kind of device; without it each device draws for itself, faster, from the same seeds.
    """
    for name, parameter in module.named_parameters():
        init = getattr(parameter, "initial", None)
        if init is not None and not parameter.is_meta:
            fill(
                parameter,
                name,
                init,
                seed=seed,
                coordinate=coordinate,
                sizes=sizes,
                draw_on_cpu=draw_on_cpu,
            )


@torch.no_grad()
def fill(
    parameter: Tensor,
    name: str,
    init: Init,
    *,
    seed: int,
    coordinate: Mapping[str, int],
    sizes: Mapping[str, int],
    draw_on_cpu: bool = True,
) -> None:
    """Fill one local tensor with float32 draws of `init`, block b of `name` from mix32(seed, name, b)."""
    layout = layout_of(parameter)
    parameter.zero_()
    target = true_part(parameter, layout, coordinate, sizes)
    if init.is_constant:
        target.fill_(init.mean)
        return
    columns = layout.shape[-1]
    # of one block: blocks are the same whatever a rank holds of them
    rows = max(1, DRAW_BLOCK // columns)
    total = prod(layout.shape[:-1])
    box = layout.box(coordinate, sizes)
    drawn_block = -1
    values = torch.empty(0)
    device = torch.device("cpu") if draw_on_cpu else parameter.device
    for first_row, count, local in _row_segments(layout, box, target):
        filled = 0
        while filled < count:
            block, offset = divmod(first_row + filled, rows)
            # neighbouring segments often lie in one block, which is then drawn once
            if block != drawn_block:
                # by name and block, not by rank: the same values whatever the layout
                generator = torch.Generator(device).manual_seed(mix32(seed, name, block))
                size = (min(rows, total - block * rows), columns)
                values = init.drawn(size, device, generator)
                drawn_block = block
            count_now = min(count - filled, rows - offset)
            local[filled : filled + count_now].copy_(values[offset : offset + count_now, box[-1]])
            filled += count_now


def _row_segments(
    layout: Layout, box: tuple[slice, ...], target: Tensor
) -> Iterator[tuple[int, int, Tensor]]:
    """(first global row, rows, local view [rows, columns]) of each run of rows that is contiguous globally."""
    shape = layout.shape[:-1]
    row_slices = box[:-1]
    if not row_slices:
        yield 0, 1, target[None]
        return
    # of a tensor of three or more dims (stacked experts) the rows of a shard are several runs
    for index in product(*(range(interval.stop - interval.start) for interval in row_slices[:-1])):
        first_row = 0
        for position, interval, size in zip(index, row_slices, shape, strict=False):
            first_row = first_row * size + position + interval.start
        innermost = row_slices[-1]
        yield (
            first_row * shape[-1] + innermost.start,
            innermost.stop - innermost.start,
            target[index],
        )
