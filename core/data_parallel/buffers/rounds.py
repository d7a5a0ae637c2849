"""The order in which the buckets of one round are summed, the same on all ranks."""

from collections.abc import Callable, Sequence

import torch

from core.data_parallel.buffers.buffers import Buffer

# sums under way at once: each holds a bucket of scratch memory, at stages 2 and 3 full gradients
IN_FLIGHT = 2


def after_backward(call: Callable[[], None]) -> None:
    """Have the backward that runs call `call()` at its end, unless it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class Round:
    """The buckets of one stage, in the order in which they are completed.

    A backward completes them from the last layer to the first. A separate W (split backward) empties its bag of
    weight gradients from the end, that is from the first layer to the last; norms, which no bag holds, come last
    then.
    """

    def __init__(self, buffers: Sequence[Buffer], sums_under_way: list[Buffer]) -> None:
        split_order = sorted(reversed(buffers), key=lambda buffer: buffer.bucket.vector)
        self._orders = {False: list(buffers), True: split_order}
        self._under_way = sums_under_way
        self.open = False
        self._missing_parameters: dict[Buffer, int] = {}
        self._with_started_sum: set[Buffer] = set()
        self.buffers = self._orders[False]
        self._next = 0

    def begin(self, *, split: bool) -> None:
        """A new round: nothing has arrived, no sum has started."""
        self.open = True
        self._next = 0
        self.buffers = self._orders[split]
        self._missing_parameters = {buffer: len(buffer.parameters) for buffer in self.buffers}
        self._with_started_sum.clear()

    def count_parameter(self, buffer: Buffer) -> bool:
        """One parameter of `buffer` is complete. Returns whether all of them are."""
        self._missing_parameters[buffer] = missing = self._missing_parameters[buffer] - 1
        return missing == 0

    def advance(self) -> None:
        """Start what is complete, up to the first bucket that is not: the order is part of the agreement."""
        while (
            self._next < len(self.buffers)
            and self._missing_parameters[self.buffers[self._next]] <= 0
        ):
            self._start(self.buffers[self._next])

    def counts_now(self, buffer: Buffer) -> bool:
        """Whether this round counts `buffer` now. Raises LookupError: it is too late, its sum has started."""
        if not self.open or buffer not in self._missing_parameters:
            return False
        if buffer in self._with_started_sum:
            raise LookupError
        return True

    def end(self) -> None:
        """The round is over: start the sums that wait for parameters which got no gradient."""
        if self.open:
            for buffer in self.buffers[self._next :]:
                self._start(buffer)
            self.open = False

    def _start(self, buffer: Buffer) -> None:
        self._next += 1
        self._with_started_sum.add(buffer)
        # bound the memory of sums under way: the oldest ends before the next one begins
        if len(self._under_way) >= IN_FLIGHT and buffer.holds_scratch:
            self._under_way.pop(0).wait_sum()
        buffer.start_sum()
        self._under_way.append(buffer)
