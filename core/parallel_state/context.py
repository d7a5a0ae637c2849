"""Which rows of a sequence a context rank holds: the one place that slices batches along the sequence. Pure.

A causal query sees the keys before it, so late rows cost more than early ones. The sequence is cut into two chunks
per rank, of which each rank holds an early and a late one (zigzag), so that all compute the same. 4 ranks, 8 chunks:

    rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4

Where `ulysses` ranks exchange heads (they compute on the same rows), the rows of a zigzag over cp / ulysses ranks are
cut once more, into `ulysses` consecutive parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.parallel_state.by_hand.batches import batch_is_cut, rows_are_cut
from core.parallel_state.collectives import Group
from core.parallel_state.documents import mark_documents

if TYPE_CHECKING:
    from core.parallel_state.state import ParallelState

# entries of a batch that have a value for each token, [b, s] or [1, s]
_PER_TOKEN = ("tokens", "input_ids", "labels", "position_ids", "document_begin", "loss_mask")


def zigzag(s: int, size: int, rank: int) -> list[range]:
    """The rows of `rank` of `size`, ascending, as runs; all of them where it is alone."""
    if size == 1:
        return [range(s)]
    chunk = s // (2 * size)
    return [range(index * chunk, (index + 1) * chunk) for index in (rank, 2 * size - 1 - rank)]


@dataclass(frozen=True)
class ContextRows:
    """The rows of rank `rank` of `size` context ranks, of which `ulysses` exchange heads."""

    size: int = 1
    rank: int = 0
    ulysses: int = 1
    # the context ranks, where they are known
    group: Group | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of_state(cls, ps: "ParallelState") -> "ContextRows":
        """Which rows the rank of `ps` holds."""
        size, rank = ps.config.context, ps.coordinate["cp"]
        return cls(size, rank, ps.config.ulysses_ranks, ps.group("cp"))

    @cached_property
    def ring(self) -> int:
        """Ranks that hold other rows once heads are exchanged."""
        return self.size // self.ulysses

    @cached_property
    def ring_rank(self) -> int:
        """This rank's position among them."""
        return self.rank // self.ulysses

    def runs(self, s: int) -> list[range]:
        """The rows of a sequence of `s`, in the order in which this rank holds them, ascending.

        Raises ValueError: s is no multiple of 2 cp.
        """
        if wrong := wrong_length(s, self.size):
            raise ValueError(wrong)
        count = s // self.size
        # of this part among the rows of the ring's rank
        first = self.rank % self.ulysses * count
        runs = []
        for run in zigzag(s, self.ring, self.ring_rank):
            part = run[max(0, first) : max(0, first + count)]
            first -= len(run)
            runs += [part] if part else []
        return runs

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's rows of a tensor of whole sequences along `dim`, contiguous: Megatron's losses `view(-1)`.

        What a program makes of [b, s] is followed like a batch of `context_batch`.
        """
        rows = self.cut(tensor, dim)
        if rows is not tensor and rows.dim() == 2 and dim in (1, -1):
            rows_are_cut(self.group, rows, tensor)
        return rows

    def cut(self, tensor: Tensor, dim: int) -> Tensor:
        """`of`, where nobody makes anything else of the rows."""
        if self.size == 1:
            return tensor
        parts = [tensor.narrow(dim, run.start, len(run)) for run in self.runs(tensor.shape[dim])]
        if len(parts) == 1:
            return parts[0].contiguous()
        return torch.cat(parts, dim)

    def rows(self, s: int) -> Tensor:
        """The same as numbers, int64 [s/cp] on the CPU."""
        return torch.cat([torch.arange(run.start, run.stop, device="cpu") for run in self.runs(s)])


def wrong_length(s: int, size: int) -> str | None:
    """What is wrong with sequences of `s` tokens over `size` context ranks; None: nothing."""
    unit = 2 * size
    if size == 1 or s % unit == 0:
        return None
    below = s // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    return f"sequence length {s} is not a multiple of 2 x context({size}) = {unit}; use {nearest}"


def context_batch(batch: Mapping[str, Any], ps: "ParallelState") -> dict[str, Any]:
    """A batch of whole sequences [b, s] -> this context rank's rows of it, [b, s/cp]; the same batch at cp 1.

    Entries: tokens (or input_ids), labels, position_ids, document_begin, loss_mask. position_ids, the rows' numbers
    in the sequence, are filled in where the batch has none. Others that have no rows pass through. No collective.
    Raises ValueError: s is no multiple of 2 cp; a bool attention_mask, which would be of size s x s; an entry that
    has a value for each token and another name.
    """
    rows = ContextRows.of_state(ps)
    if rows.size == 1:
        return dict(batch)
    if batch.get("attention_mask") is not None:
        raise ValueError(
            f"attention_mask is of size s x s, and context={rows.size} ranks hold s/{rows.size} rows each; give "
            "document_begin [b, s], the row where each token's document begins, or use context=1"
        )
    tokens = batch["tokens"] if "tokens" in batch else batch.get("input_ids")
    if tokens is None:
        raise ValueError(
            f"the batch has {', '.join(batch) or 'nothing'}; context_batch needs tokens [b, s]"
        )
    b, s = tokens.shape
    if unknown := [
        name for name, value in batch.items() if name not in _PER_TOKEN and _has_rows(value, s)
    ]:
        raise ValueError(
            f"{', '.join(unknown)}: context_batch does not know whether dim 1 is the sequence of {s} rows, of which "
            f"{rows.size} context ranks hold parts; known: {', '.join(_PER_TOKEN)}. Cut it with "
            "ContextRows.of_state(ps).of(value, dim)"
        )
    local_batch = {}
    for name, value in batch.items():
        if name in _PER_TOKEN:
            local_batch[name] = rows.cut(value, 1)
        else:
            local_batch[name] = value
    if local_batch.get("position_ids") is None:
        local_batch["position_ids"] = rows.rows(s).to(tokens.device).expand(b, -1)
    of_rows = {name: local_batch[name] for name in _PER_TOKEN if name in local_batch}
    batch_is_cut(ps.group("cp"), of_rows, batch)
    mark_documents(local_batch)
    return local_batch


def _has_rows(value: Any, s: int) -> bool:
    return getattr(value, "ndim", 0) >= 2 and value.shape[1] == s
