"""Sums of a batch's rows by which losses are divided."""

import torch
from torch import Tensor

from core.context_parallel.rows.batches import BatchRows
from core.parallel_state.by_hand.split_tensor import SplitTensor
from core.parallel_state.collectives.checks import fingerprint


class Divisors:
    """Sums of a batch's rows by which one output's rows are divided; ranks compare them, as fingerprints."""

    def __init__(self, batch: BatchRows, device: torch.device) -> None:
        self._batch = batch
        self.numbers = torch.zeros(2, dtype=torch.float64, device=device)
        self._count = 0
        self._latest = ""

    def meet(self, name: str, x: SplitTensor) -> None:
        """`x`, made across a batch's rows, meets rows of losses by a function `name`: told, or to be compared."""
        if x.numbers is None:
            self._batch.tell(x, f"comes to the loss by {name}")
            return
        for number in x.numbers:
            self.note(number, x.partial)

    def note(self, number: Tensor, made_by: str) -> None:
        """One of the sums."""
        self._count += 1
        self.numbers += fingerprint(number.double()).to(self.numbers.device) * self._count
        self._latest = made_by

    def told_of(self, numbers: Tensor) -> str:
        """What is said of the ranks' `numbers`, [ranks, 2]; "" if they are equal."""
        used = [rank for rank in numbers if rank.isfinite().all() and rank.any()]
        if all(torch.allclose(rank, used[0], rtol=1e-9, atol=0) for rank in used):
            return ""
        return (
            f"rows are weighted by {self._latest} of a batch's rows which are this context rank's, not all of a "
            "sequence: one process weighs them by the whole"
        )
