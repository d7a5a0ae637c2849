"""Steps whose gradient norm stands out from those before, which are skipped where the user asks for it.

A loss spike begins with a gradient many times as large as usual; clipping shortens it, but keeps its direction. OLMo
skips such steps by a rolling mean and deviation; here it is the median, which single spikes do not move.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Spikes:
    """The last `window` gradient norms that were finite, those of spikes among them: what stays high is no spike.

    factor: a norm above `factor` times their median is a spike, once half a window is known; 0: nothing is. All of
    it stays on the device, and is the same on every rank, because the norm is.
    """

    def __init__(self, factor: float, window: int, device: torch.device) -> None:
        self._factor = factor
        self._least = -(-window // 2)
        self._norms = torch.full((window if factor else 0,), torch.nan, device=device).double()
        self._places = torch.arange(self._norms.numel(), device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def look(self, norm: Tensor) -> tuple[Tensor, Tensor | None]:
        """(whether `norm` is a spike, the median that it was compared with: NaN as long as too few are known)."""
        if not self._factor:
            return torch.zeros_like(norm, dtype=torch.bool), None
        # NaN stands for a norm that is not known: `nanmedian` leaves it out, and a comparison with it is false
        enough = self._count >= self._least
        median = torch.where(enough, self._norms.nanmedian(), torch.nan)
        # a ring: the newest takes the place of the oldest, chosen on the device, so that nothing waits
        is_finite = norm.isfinite()
        oldest = self._count % self._norms.numel()
        is_replaced = (self._places == oldest) & is_finite
        self._norms = torch.where(is_replaced, norm, self._norms)
        self._count = self._count + is_finite
        stands_out = (median > 0) & (norm > self._factor * median)
        return is_finite & stands_out, median

    def state(self) -> dict[str, list[float]]:
        """For a checkpoint (waits for the device); empty where nothing is known. Oldest first."""
        count = int(self._count.item())
        size = self._norms.numel()
        if not count:
            return {}
        if count > size:
            oldest = count % size
        else:
            oldest = 0
        known = self._norms.roll(-oldest)[: min(count, size)]
        return {"norms": known.tolist()}

    def load(self, norms: Sequence[float]) -> None:
        """Go on from the norms that `state` gave, of a longer or shorter window too; without any, begin."""
        size = self._norms.numel()
        newest = max(0, len(norms) - size)
        known_norms = list(norms)[newest:]
        self._norms = torch.full_like(self._norms, torch.nan)
        self._norms[: len(known_norms)] = torch.tensor(known_norms, dtype=torch.float64)
        self._count.fill_(len(known_norms))
