"""The attention of one rank's queries, block by block of keys: each block comes from one rank, itself included."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from core.context_parallel.blocks import AttentionBlock, Piece, Rows, blocks, pieces, whole
from core.context_parallel.documents import Documents
from core.context_parallel.kernels import attend, attend_backward, merge, wide
from core.parallel_state.context import zigzag


@lru_cache(maxsize=64)
def _row_numbers(s: int, size: int, rank: int) -> Rows:
    """The rows of one rank of a ring, ascending."""
    return np.concatenate([np.arange(run.start, run.stop) for run in zigzag(s, size, rank)])


class RowsOfRing:
    """What a rank of `size` knows before it sees a key: its blocks, and their kernel calls.

    s: of the whole sequence. documents: of this rank's rows; None: one document. scale: of the scores.
    """

    def __init__(
        self, size: int, rank: int, s: int, documents: Documents | None, scale: float
    ) -> None:
        self.size = size
        self.rank = rank
        self.s = s
        self.scale = scale
        self.documents = documents
        self.own, *self.others = blocks(size, rank, s // size)

    def _rows(self, rank: int) -> Rows:
        return _row_numbers(self.s, self.size, rank)

    def pieces(self, block: AttentionBlock) -> Sequence[Piece]:
        """The kernel calls of a block."""
        if self.documents is None:
            return whole(block)
        first, last = self.documents.bounds.numpy()
        query_rows = self._rows(self.rank)
        key_rows = self._rows(block.source)
        lowest_key = key_rows[block.keys.start]
        # ascending: no query begins after the first key
        if last[block.queries.stop - 1] <= lowest_key:
            return whole(block)
        return list(pieces(block, query_rows, key_rows, first, last))

    def bias(self, block: AttentionBlock, piece: Piece, q: Tensor) -> Tensor:
        """The additive mask of a piece that needs one, [b or 1, 1, queries, keys]."""
        assert self.documents is not None
        keys = torch.from_numpy(self._rows(block.source)[piece.keys]).to(
            q.device, non_blocking=True
        )
        queries = torch.from_numpy(self._rows(self.rank)[piece.queries]).to(
            q.device, non_blocking=True
        )
        begin = self.documents.begin[:, piece.queries, None]
        hidden = (keys < begin) | (keys > queries[:, None])
        return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(
            hidden, -torch.inf
        )[:, None]


@lru_cache(maxsize=64)
def known_rows(size: int, rank: int, s: int, documents: None, scale: float) -> RowsOfRing:
    """`RowsOfRing` without documents: the same in every layer and step."""
    return RowsOfRing(size, rank, s, documents, scale)


class Attended:
    """Output and logsumexp of the queries q [b, a, n, d], as blocks of keys arrive, the own ones first."""

    def __init__(self, rows: RowsOfRing, q: Tensor) -> None:
        self._rows = rows
        self._q = q
        # of what blocks are merged into
        if rows.others:
            self._dtype = wide(q.dtype)
        else:
            self._dtype = q.dtype
        self._out: Tensor
        self._logsumexp: Tensor

    def add(self, block: AttentionBlock, k: Tensor, v: Tensor) -> None:
        """k, v [b, g, n, d]: all rows of the block's source."""
        rows = self._rows
        q = self._q
        for piece in rows.pieces(block):
            queries = piece.queries
            keys = piece.keys
            bias = rows.bias(block, piece, q) if piece.masked else None
            part = q[:, :, queries], k[:, :, keys], v[:, :, keys]
            out, logsumexp = attend(*part, causal=piece.causal, bias=bias, scale=rows.scale)
            if block is not rows.own:
                # a softmax over more keys, from two over fewer: weighted by their logsumexp
                merge(self._out[:, :, queries], self._logsumexp[:, :, queries], out, logsumexp)
            elif out.shape == q.shape:  # all rows at once
                self._out = out.to(self._dtype)
                self._logsumexp = logsumexp
            else:
                if queries.start == 0:
                    self._out = torch.empty_like(q, dtype=self._dtype)
                    self._logsumexp = logsumexp.new_empty(q.shape[:3])
                self._out[:, :, queries], self._logsumexp[:, :, queries] = out, logsumexp

    def result(self) -> tuple[Tensor, Tensor]:
        """out [b, a, n, d] in q's dtype, logsumexp [b, a, n]."""
        return self._out.to(self._q.dtype), self._logsumexp


class Gradients:
    """The gradient of the queries, and of each block's keys and values, as blocks arrive."""

    def __init__(
        self, rows: RowsOfRing, grad: Tensor, q: Tensor, out: Tensor, logsumexp: Tensor
    ) -> None:
        self._rows = rows
        self._grad = grad
        self._q = q
        self._out = out
        self._logsumexp = logsumexp
        if rows.others:
            self._dtype = wide(q.dtype)
        else:
            self._dtype = q.dtype
        self._dq: Tensor | None = None

    def add(self, block: AttentionBlock, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """-> gradients of the block's keys and values, [b, g, keys of the block, d]; k, v: all rows of its source."""
        rows = self._rows
        is_own = block is self._rows.own
        pieces = rows.pieces(block)
        sums: tuple[Tensor, Tensor] | None = None
        if len(pieces) != 1 or len(range(*pieces[0].keys.indices(k.shape[2]))) != len(block.keys):
            # strips of one block add to the same keys: in float32 at least
            shape = (*k.shape[:2], len(block.keys), k.shape[3])
            sums = k.new_zeros(shape, dtype=wide(k.dtype)), v.new_zeros(shape, dtype=wide(v.dtype))
        dk = dv = k.new_zeros(())
        for piece in pieces:
            queries = piece.queries
            keys = piece.keys
            bias = rows.bias(block, piece, self._q) if piece.masked else None
            part = self._grad[:, :, queries], self._q[:, :, queries], k[:, :, keys], v[:, :, keys]
            merged = self._out[:, :, queries], self._logsumexp[:, :, queries]
            dq, dk, dv = attend_backward(
                *part, *merged, causal=piece.causal, bias=bias, scale=rows.scale
            )
            self._add_queries(queries, dq, is_own=is_own)
            if sums is not None:
                target = slice(keys.start - block.keys.start, keys.stop - block.keys.start)
                sums[0][:, :, target] += dk
                sums[1][:, :, target] += dv
        if sums is None:
            return (dk, dv)
        return (sums[0].to(k.dtype), sums[1].to(v.dtype))

    def _add_queries(self, queries: slice, dq: Tensor, *, is_own: bool) -> None:
        q = self._q
        if is_own and dq.shape == q.shape:
            self._dq = dq.to(self._dtype)
            return
        if self._dq is None:
            self._dq = torch.empty_like(q, dtype=self._dtype)
        if is_own:
            self._dq[:, :, queries] = dq
        else:
            self._dq[:, :, queries] += dq

    def of_queries(self) -> Tensor:
        """dq [b, a, n, d]."""
        assert self._dq is not None
        return self._dq.to(self._q.dtype)
