"""Initial values that do not depend on the layout: drawn in blocks of whole rows, seeded by name and block."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor, nn

from core.parallel_state.layout import Layout, layout_of, true_part
from core.parallel_state.random import mix32

DRAW_BLOCK = 1 << 20  # elements of one block: the unit of drawing, whatever the layout


@dataclass(frozen=True)
class Init:
    """Normal with `mean` and `std`; std 0 is a constant, and padded rows are always 0."""

    std: float = 0.0
    mean: float = 0.0


def initialize_parameters(
    module: nn.Module,
    *,
    seed: int,
    at: Mapping[str, int],
    sizes: Mapping[str, int],
    draw_on_cpu: bool = True,
) -> None:
    """Fill every parameter that carries an `Init` with its part of the whole tensor's initial values; not on meta.

    Each rank draws only the blocks that touch its part. With `draw_on_cpu` the values are the same on every
    kind of device; without it each device draws for itself, faster, from the same seeds.
    """
    for name, parameter in module.named_parameters():
        init = getattr(parameter, "initial", None)
        if init is not None and not parameter.is_meta:
            fill(parameter, name, init, seed=seed, at=at, sizes=sizes, draw_on_cpu=draw_on_cpu)


@torch.no_grad()
def fill(
    parameter: Tensor,
    name: str,
    init: Init,
    *,
    seed: int,
    at: Mapping[str, int],
    sizes: Mapping[str, int],
    draw_on_cpu: bool = True,
) -> None:
    """Fill one local tensor: `mean + std * normal`, float32 draws, block b of `name` from mix32(seed, name, b)."""
    layout = layout_of(parameter)
    parameter.zero_()
    mine = true_part(parameter, layout, at, sizes)
    if init.std == 0.0:
        mine.fill_(init.mean)
        return
    columns = layout.shape[-1]
    rows = max(1, DRAW_BLOCK // columns)  # of one block
    total = prod(layout.shape[:-1])
    box = layout.box(at, sizes)
    drawn, values = -1, torch.empty(0)
    device = torch.device("cpu") if draw_on_cpu else parameter.device
    for first, count, target in _row_segments(layout, box, mine):
        done = 0
        while done < count:
            block, offset = divmod(first + done, rows)
            if block != drawn:
                generator = torch.Generator(device).manual_seed(mix32(seed, name, block))
                size = (min(rows, total - block * rows), columns)
                values = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
                values, drawn = values.mul_(init.std).add_(init.mean), block
            n = min(count - done, rows - offset)
            target[done : done + n].copy_(values[offset : offset + n, box[-1]])
            done += n


def _row_segments(layout: Layout, box: tuple[slice, ...], mine: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(first global row, rows, local view [rows, columns]) of each run of rows that is contiguous globally."""
    shape, lead = layout.shape[:-1], box[:-1]
    if not lead:
        yield 0, 1, mine[None]
        return
    for index in product(*(range(s.stop - s.start) for s in lead[:-1])):
        first = 0
        for i, s, n in zip(index, lead, shape, strict=False):
            first = first * n + i + s.start
        yield first * shape[-1] + lead[-1].start, lead[-1].stop - lead[-1].start, mine[index]
