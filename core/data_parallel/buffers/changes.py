"""What a program did to `p.grad` between backward and step, as one number that replicas can compare.

Each rank updates its shard of a parameter from its own `p.grad`. Values of one rank alone (noise of its own
generator, a factor of its own loss) would be stitched together, or would let the replicas drift apart at stage 0.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from core.parallel_state.collectives.checks import MODULUS, checksum

# the weights of changes: exchanged ones differ
_POSITIONS = 1 << 20


class ChangesByHand:
    """The changes of one step, in the order in which the program made them."""

    def __init__(self) -> None:
        self._changes: list[Tensor | int] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was changed since the last `take`."""
        return not self._changes

    def add(self, value: Tensor | float) -> None:
        """A gradient that was put in, or a number that all of it was changed by; nothing waits for a device."""
        if isinstance(value, Tensor):
            # zeros are a change, too
            self._changes.append(checksum(value) + 1)
        else:
            # of a number the same in every process
            self._changes.append(hash(value) % MODULUS + 1)

    def add_call(self, function: str, places: Sequence[tuple[int, int]]) -> None:
        """A function in place, and on which gradients (bucket, number in it)."""
        self._changes.append(zlib.crc32(f"{function}{places}".encode()) % MODULUS + 1)

    def take(self, device: torch.device) -> Tensor:
        """The number, float64 [], 0 if there was no change; then there are none."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for position, change in enumerate(self._changes):
            total += change * (position % _POSITIONS + 1)
        self._changes = []
        return total
