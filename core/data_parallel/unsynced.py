"""`no_sync` of loops that were written for DDP: what of it is here, and reads of gradients that it left unsummed."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core.parallel_state.by_hand.functions import program_level


class Unsynced:
    """Knows whether all contributions so far came inside of a block of `no_sync`. arrivals: how many there were."""

    def __init__(self, arrivals: Callable[[], int]) -> None:
        self._arrivals = arrivals
        # at the beginning of the block that runs, and at the end of the last one in which any came
        self._at_begin: int | None = None
        self._at_end = -1
        self._is_told = False

    @contextmanager
    def begun(self) -> Iterator[None]:
        """The block of `no_sync`."""
        self._at_begin = begin = self._arrivals()
        try:
            yield
        finally:
            self._at_begin = None
            if self._arrivals() > begin:
                self._at_end = self._arrivals()

    def stepped(self) -> None:
        """An optimizer has used gradients, which this summed all the same."""
        if self._arrivals() == self._at_end and not self._is_told:
            self._is_told = True
            warnings.warn(
                "every backward of this step was inside of no_sync, after which DDP has gradients of each rank, and "
                "the ranks go apart: here they were averaged over the data ranks, as in every step. For local steps "
                "(DiLoCo) train a model that is not in DataParallel, and average its weights by torch.distributed",
                stacklevel=program_level(),
            )

    def reading(self, sum_and_average: Callable[[], None]) -> Callable[[], None]:
        """`sum_and_average`, for who reads values of `p.grad`; a first read of what DDP has not summed is told."""

        def read() -> None:
            count = self._arrivals()
            in_block = self._at_begin is not None and count > self._at_begin
            if (in_block or count == self._at_end) and not self._is_told:
                self._is_told = True
                warnings.warn(
                    "p.grad is read after a backward inside of no_sync, where DDP has this rank's own gradient: here "
                    "it is the mean over the data ranks, as everywhere. A rank's own is torch.autograd.grad(loss, "
                    "parameters)",
                    stacklevel=program_level(),
                )
            sum_and_average()

        return read
