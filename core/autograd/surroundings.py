"""What of torch's own state a second run must find as the first did: random numbers, autocast."""

from collections.abc import Callable

import torch
from torch import Tensor


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The CPU's, and the device's own."""
    own = None if device.type in ("cpu", "meta") else torch.get_device_module(device).get_rng_state(device)
    return torch.get_rng_state(), own


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Set the CPU's and the device's generator to what `random_state` gave."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)


class Autocast:
    """Whether a kind of device casts, and to what."""

    def __init__(self, device: torch.device) -> None:
        self.kind = device.type
        self.known = torch.amp.is_autocast_available(self.kind)
        self.enabled = self.known and torch.is_autocast_enabled(self.kind)
        self.dtype = torch.get_autocast_dtype(self.kind) if self.known else None

    def again(self, call: Callable[[], list]) -> list:
        """`call()` as it was then."""
        if not self.known or not (self.enabled or torch.is_autocast_enabled(self.kind)):
            return call()
        with torch.autocast(self.kind, dtype=self.dtype, enabled=self.enabled):
            return call()
