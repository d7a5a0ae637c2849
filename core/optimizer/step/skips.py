"""How many steps were skipped because their gradients were not finite, and when that is an error."""

from collections.abc import Callable

import torch
from torch import Tensor

from core.parallel_state.environment import reading_waits

# that many first steps that are all skipped are an error, whatever max_skipped_steps says
ALL_SKIPPED = 100


class Skips:
    """Counts on the device, so that no step waits for it; `most`: of steps in a row, 0 for any number."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._most = most
        self._device = device
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._in_row = torch.zeros_like(self._count)
        self._steps_here = 0  # starts at 0 after a restart too

    @property
    def count(self) -> int:
        """All of them (waits for the device)."""
        return int(self._count.item())

    def begin_at(self, count: int) -> None:
        """So many were skipped before this process began; the last step was not."""
        self._count.fill_(count)
        self._in_row.zero_()

    def add(self, found_inf: Tensor, step: int, reason: Callable[[], str]) -> None:
        """After update number `step`; reason: collective, called on every rank or on none.

        Raises RuntimeError: more in a row than `most`.
        """
        self._count += found_inf
        self._in_row = torch.where(found_inf, self._in_row + 1, 0)
        self._steps_here += 1
        limit = self._most or (ALL_SKIPPED if self._steps_here == ALL_SKIPPED else 0)
        # reading the count waits for an accelerator, so there only every `limit` steps
        looks = limit and (not reading_waits(self._device) or step % limit == 0)
        if looks and (in_row := int(self._in_row.item())) >= limit:
            raise RuntimeError(
                f"step {step}: {in_row} steps in a row were skipped, max_skipped_steps={self._most}: {reason()}"
                "; lower the learning rate or look at the data of these steps"
            )
