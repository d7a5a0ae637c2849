"""Vocabulary parallelism (arXiv 1909.08053): a table whose rows are split over ranks, padded in memory only."""

import torch
from torch import Tensor

from core.autograd import deferred_embedding
from core.parallel_state import Init, Layout
from core.tensor_parallel.differences import refuse_other_ids
from core.tensor_parallel.own_modules import PlacedModule
from core.tensor_parallel.placement import Placement


def padded_vocab_rows(vocab_size: int, tp: int) -> int:
    """Rows of a vocabulary in memory, all ranks together.

    For tp of 1, 2, 4, 8 always the same number, 8 equal multiples of 16, so that the shards' edges agree and a
    checkpoint's chunks do too; for another tp the smallest multiple of 16 per rank.
    """
    # common sizes share one number of rows, so that a change among them changes no padding
    if tp in (1, 2, 4, 8):
        return 8 * _round_up(-(-vocab_size // 8))
    return tp * _round_up(-(-vocab_size // tp))


def _round_up(rows: int, multiple: int = 16) -> int:
    return -(-rows // multiple) * multiple


def vocab_layout(
    vocab_size: int,
    hidden_size: int,
    tp: int,
    partial: frozenset[str] = frozenset(),
    *,
    is_padded: bool,
) -> Layout:
    """Layout of a [v, h] table whose rows are split over tp. is_padded: also where tp divides the rows."""
    padding = {0: padded_vocab_rows(vocab_size, tp) - vocab_size}
    if not is_padded and vocab_size % tp == 0:
        padding = {}
    return Layout((vocab_size, hidden_size), {"tp": 0}, partial, padding)


class VocabParallelEmbedding(PlacedModule):
    """ids -> rows of a [v, h] table, rank r holding rows r*v_padded/tp and on.

    ids: [s, b] the same on every rank -> [s, b, h] on every rank ([s/tp, b, h] under sequence parallelism).
    weight: [v_padded/tp, h]; padded rows are zero and never used. Where tp divides the rows there are none: a head
    that is tied by hand has no columns of padding. is_padded: there, too, so that other tp have the same rows.
    Forward: all-reduce (reduce-scatter). Backward: all-gather of dy (sequence parallelism only).
    """

    is_whole_outside = True
    stands_for = "Embedding"

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        place: Placement | None = None,
        init: Init = Init(std=0.02),
        partial: frozenset[str] = frozenset(),
        is_padded: bool = False,
    ) -> None:
        super().__init__()
        place = place or Placement()
        self.vocab_size = vocab_size
        layout = vocab_layout(vocab_size, hidden_size, place.tp, partial, is_padded=is_padded)
        self.weight = place.parameter(layout, init)
        self.rank = place.rank
        self.is_full_table = place.group is None
        self.stage = place.stage
        self.comm = place.row_comm()
        self.group = place.group
        # calls without gradients with ids of one shape, one after the other
        self._calls, self._shape = 0, torch.Size()
        self.place_in(place.own_modules)

    def forward(self, ids: Tensor) -> Tensor:
        """[s, b] -> [s, b, h] (see the class). Raises ValueError: other ids on another tensor rank."""
        # of a generation by hand, which passes by the model's own forward and what is compared there
        if self.group is not None and not torch.is_grad_enabled():
            self._compare(ids)
        weight = self.weight
        return deferred_embedding(
            ids,
            weight,
            # asked here: a head's table, which may be tied to this one, has other rows. Ids below it, or behind this
            # rank's rows, give zeros; the sum over ranks fills them in
            first=self.rank * weight.shape[0],
            is_full_table=self.is_full_table,
            stage=self.stage,
            comm=self.comm,
        )

    @torch.compiler.disable
    def _compare(self, ids: Tensor) -> None:
        """In calls 1, 2, 4 ... with ids of one shape."""
        if ids.shape != self._shape:
            self._calls, self._shape = 0, ids.shape
        self._calls += 1
        if self.group is not None and not self._calls & (self._calls - 1):
            refuse_other_ids(ids, self.group)
