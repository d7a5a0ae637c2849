"""Causal attention of a rank's rows with the keys of all context ranks, by any way of exchanging them."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from core.autograd import note, notes_activations
from core.autograd.gradients import no_second_derivative
from core.context_parallel import gathered, ring
from core.context_parallel.documents import Documents
from core.context_parallel.heads import from_heads, to_heads
from core.context_parallel.rows_attention import RowsOfRing, known_rows
from core.parallel_state import ContextRows, ParallelState
from core.parallel_state.collectives import Group


class Exchange:
    """How the context ranks of `ps` see each other's keys; at cp 1 there is nothing to exchange."""

    def __init__(self, ps: ParallelState) -> None:
        self._ps = ps
        self.rows = ContextRows.of_state(ps)
        self.heads: Group | None = ps.group("ulysses")
        # Megatron's names of the ways: p2p is the ring, a2a Ulysses, a2a+p2p both, all_gather what is left
        self._travels = self.rows.ring > 1 and ps.config.cp_comm_type in ("p2p", "a2a+p2p")
        self._group = ps.group("cp") if self.rows.ring > 1 else None

    @cached_property
    def _ring(self) -> ring.Ring:
        members = self._ps.grid.members(self._ps.rank, "cp")
        u = self.rows.ulysses
        # every u-th rank: neighbours in the context group exchange heads, so that these hold other rows
        return ring.Ring(self._ps, members[self.rows.rank % u :: u])

    def of_rows(self, q: Tensor, documents: Documents | None, scale: float) -> RowsOfRing:
        """q [b, a/u, n, d] once heads are exchanged."""
        rows = self.rows
        make = RowsOfRing if documents is not None else known_rows
        return make(rows.ring, rows.ring_rank, q.shape[2] * rows.ring, documents, scale)

    def forward(self, rows: RowsOfRing, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of the queries."""
        if self._travels:
            return ring.forward(rows, q, k, v, self._ring)
        return gathered.forward(rows, q, k, v, self._group)

    def backward(self, rows: RowsOfRing, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tensors: grad, q, k, v, out, logsumexp. Gradients of q, k, v."""
        if self._travels:
            return ring.backward(rows, *tensors, self._ring)  # type: ignore[call-arg, arg-type]
        return gathered.backward(rows, *tensors, self._group)  # type: ignore[call-arg, arg-type]


class _ContextAttention(torch.autograd.Function):
    """Without parameters: all of its backward is I."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exchange: Exchange,
        documents: Documents | None,
        scale: float,
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.documents = documents
        ctx.scale = scale

        def attend() -> tuple[Tensor, ...]:
            # Ulysses first: after it this rank has some heads of more rows, and rings or gathers with its likes
            if exchange.heads is None:
                return exchange.forward(exchange.of_rows(q, documents, scale), q, k, v)
            exchanged = to_heads((q, k, v), exchange.heads)
            out, logsumexp = exchange.forward(
                exchange.of_rows(exchanged[0], documents, scale), *exchanged
            )
            (back,) = from_heads((out,), exchange.heads)
            return back, logsumexp, *exchanged, out

        # where the output is noted, a second run exchanges nothing: heads are exchanged in backward instead
        ctx.by_heads = exchange.heads is not None and not notes_activations()
        if ctx.by_heads:
            result, logsumexp, *saved = attend()
        else:
            result, logsumexp = note(lambda: attend()[:2], activation=True)
            saved = [q, k, v, result]
        ctx.save_for_backward(*saved, logsumexp)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise no_second_derivative("attention over context ranks")
        exchange = ctx.exchange
        *saved, logsumexp = ctx.saved_tensors
        heads = exchange.heads
        # what is saved has the layout of heads, or that of rows; the gradient is brought to the same
        if ctx.by_heads:
            (grad,) = to_heads((grad,), heads)
        elif heads is not None:
            grad, *saved = to_heads((grad, *saved), heads)
        rows = exchange.of_rows(saved[0], ctx.documents, ctx.scale)
        gradients = exchange.backward(rows, grad, *saved, logsumexp)
        return *(from_heads(gradients, heads) if heads is not None else gradients), None, None, None


@torch.compiler.disable
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    exchange: Exchange,
    *,
    documents: Documents | None = None,
    scale: float,
) -> Tensor:
    """softmax(scale q k^T) v of this rank's rows: q [b, a/tp, s/cp, d], k, v [b, g/tp, s/cp, d] -> as q.

    A query sees its own row and those before it, within its document. Each rank holds the rows of `ContextRows`.
    Memory: q, k, v, the output and its logsumexp; beside them, for one layer at a time, what is exchanged (docs/
    concepts/context_parallel.md). Collectives over the context ranks, in forward and in backward.
    """
    result: Tensor = _ContextAttention.apply(q, k, v, exchange, documents, scale)
    return result
