"""Where the documents of packed sequences begin, for the rows of a rank, without a mask of size s x s."""

from typing import NamedTuple

import torch
from torch import Tensor

from core.parallel_state import ContextRows, ParallelState
from core.parallel_state.collectives import all_gather
from core.parallel_state.context import zigzag


class Documents(NamedTuple):
    """Of the rows whose attention a rank computes: their own, or the same as those it exchanges heads with.

    begin: int64 [b or 1, n], of each row the first row that it sees, ascending. bounds: int64 [2, n] on the CPU, of
    each row the lowest and the highest begin of the microbatch: by these whole ranges of keys are left out.
    """

    begin: Tensor
    bounds: Tensor


def document_rows(s: int, rows: ContextRows) -> Tensor:
    """The numbers of the rows whose attention this rank computes, int64 [n] on the CPU."""
    runs = zigzag(s, rows.ring, rows.ring_rank)
    return torch.cat([torch.arange(run.start, run.stop, device="cpu") for run in runs])


def begin_of_rows(document_begin: Tensor, ps: ParallelState) -> Documents:
    """document_begin int64 [b, s/cp] of this rank's rows -> what attention needs.

    Ranks that exchange heads gather each other's: an all-gather over them, and on an accelerator a copy to the host.
    Otherwise a `document_begin` on the CPU spares that copy.
    """
    begin = document_begin.to(ps.device, non_blocking=True)
    if (group := ps.group("ulysses")) is not None:
        document_begin = begin = all_gather(begin.t(), group).t()
    on_host = document_begin.to("cpu")
    return Documents(begin, torch.stack((on_host.amin(0), on_host.amax(0))))


def within_window(
    documents: Documents | None, window: int, rows: Tensor, device: torch.device
) -> Documents:
    """The same where a row sees at most `window` rows, itself included; rows: their numbers, int64 [n] on the CPU."""
    begin = (rows - window + 1).clamp_(min=0)
    if documents is None:
        return Documents(begin.to(device, non_blocking=True)[None], begin.expand(2, -1))
    return Documents(
        torch.maximum(documents.begin, begin.to(device, non_blocking=True)),
        torch.maximum(documents.bounds, begin),
    )


def visible_mask(document_begin: Tensor) -> Tensor:
    """document_begin [b, s] of whole sequences -> the bool mask [b, 1, s, s] for other attentions, True = masked."""
    rows = torch.arange(document_begin.shape[1], device=document_begin.device)
    is_later = rows > rows[:, None]
    is_in_earlier_document = rows < document_begin[:, None, :, None]
    return is_later | is_in_earlier_document
