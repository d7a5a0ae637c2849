"""The global gradient norm: every true element of every parameter counted once, whatever the layout.

This is where gradient clipping by norm gets its norm; `ShardedOptimizer` divides by it, `clip_grads.py` serves plain
loops.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from core.parallel_state.collectives import all_gather
from core.parallel_state.state import ParallelState

# elements whose squares are summed in the gradient's own dtype
ROW = 1024
# a multiple of ROW: 16-bit elements that are converted to float32 at a time
NORM_BLOCK = 1 << 20


def sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Of all elements, as a float64 tensor of shape []; nothing is communicated."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # reductions are trees there: exact enough, in one launch
    if device.type != "cpu":
        norms = torch.stack(torch._foreach_norm(gradients))
        return norms.double().square().sum()
    return torch.stack([_by_rows(gradient) for gradient in gradients]).sum()


def _by_rows(gradient: Tensor) -> Tensor:
    """Sum of squares, row by row in the gradient's dtype, rows in float64.

    torch's CPU norm adds up a float32 tensor one by one (3e-3 off at 30 Mi elements); short rows do not drift.
    """
    flat = gradient.reshape(-1)
    in_rows = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:in_rows].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[in_rows:])
    return rows.double().square().sum() + rest.double().square()


def shard_squares(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of this rank's gradients (1-D), as a float64 tensor of shape []."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        if gradient.dtype.itemsize >= 4:
            total = total + sum_of_squares([gradient], device)
            continue
        # 16-bit gradients become float32 a block at a time: a full copy would double their memory
        for block in gradient.split(NORM_BLOCK):
            total = total + sum_of_squares([block.float()], device)
    return total


def sum_in_rank_order(
    local: Tensor, message: Tensor | None, ps: ParallelState
) -> tuple[Tensor, list[Tensor]]:
    """The sum of every rank's number (shape []), and each rank's row: its number, then its message.

    message: 1-D, float64, of one length on all ranks; facts that travel with the norm without a call of their own.
    One all-gather over `ps.world`, summed in rank order: every rank, backend and layout gets the same bits, which an
    all-reduce does not promise.
    """
    if message is None:
        row = local.reshape(1)
    else:
        row = torch.cat((local.reshape(1), message))
    rows = list(all_gather(row, ps.world).view(-1, row.numel()))
    total = rows[0][0]
    for other in rows[1:]:
        total = total + other[0]
    return total, rows
