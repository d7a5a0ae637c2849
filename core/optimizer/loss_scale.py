"""The loss scale of float16: as large as gradients allow, found by trying, on the device."""

import torch
from torch import Tensor

SMALLEST = 1.0


class LossScale:
    """Doubles after `window` good steps in a row, halves at one that overflowed, never below 1.

    value: float64, shape []; never changed in place, so that a step may keep the one it began with. Nothing here
    waits for an accelerator.
    """

    def __init__(self, initial: float, window: int, device: torch.device) -> None:
        self._window = window
        self.value = torch.full((), initial, dtype=torch.float64, device=device)
        self._good = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """After a step; `found_inf`: bool, shape []."""
        good = torch.where(found_inf, 0, self._good + 1)
        grows = good >= self._window
        halved = (self.value / 2).clamp(min=SMALLEST)
        self.value = torch.where(found_inf, halved, torch.where(grows, self.value * 2, self.value))
        self._good = torch.where(grows, 0, good)

    def state(self) -> dict[str, float]:
        """For a checkpoint (waits for the device)."""
        return {"value": float(self.value.item()), "good_steps": int(self._good.item())}

    def load(self, state: dict[str, float]) -> None:
        """What `state` gave."""
        self.value = torch.full_like(self.value, state["value"])
        self._good = torch.full_like(self._good, int(state["good_steps"]))
