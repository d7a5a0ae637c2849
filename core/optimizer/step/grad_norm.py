"""The global gradient norm: every true element of every parameter counted once, whatever the layout."""

from collections.abc import Iterable

import torch
from torch import Tensor

from core.parallel_state.collectives import all_gather
from core.parallel_state.state import ParallelState

ROW = 1024  # elements whose squares are summed in the gradient's own dtype
NORM_BLOCK = 1 << 20  # a multiple of ROW: 16-bit elements widened at a time


def sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all elements, as a float64 tensor of shape []; nothing is communicated."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type != "cpu":  # reductions are trees there: exact enough, in one launch
        norms = torch.stack(torch._foreach_norm(gradients))
        return norms.double().square().sum()
    return torch.stack([_by_rows(g) for g in gradients]).sum()


def _by_rows(gradient: Tensor) -> Tensor:
    """torch's CPU norm adds up a float32 tensor one by one (3e-3 off at 30 Mi elements); short rows do not."""
    flat = gradient.reshape(-1)
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    return rows.double().square().sum() + rest.double().square()


def shard_squares(parts: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of this rank's `parts` (1-D), as a float64 tensor of shape []."""
    mine = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts:
        for block in part.split(NORM_BLOCK) if part.dtype.itemsize < 4 else (part,):  # widened a block at a time
            mine = mine + sum_of_squares([block.float() if block.dtype.itemsize < 4 else block], device)
    return mine


def sum_in_rank_order(mine: Tensor, beside: Tensor | None, ps: ParallelState) -> tuple[Tensor, list[Tensor]]:
    """The sum of every rank's number (shape []), and what each rank sent beside it (1-D, float64, one length on all).

    One all-gather over `ps.world`, summed in rank order: every rank, backend and way to cut gets the same bits.
    """
    message = mine.reshape(1) if beside is None else torch.cat((mine.reshape(1), beside))
    rows = list(all_gather(message, ps.world).view(-1, message.numel()))
    total = rows[0][0]
    for row in rows[1:]:
        total = total + row[0]
    return total, rows
