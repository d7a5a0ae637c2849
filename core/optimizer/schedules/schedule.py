"""The learning rate as a pure function of the number of updates made before."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from core.parallel_state.config import raise_all

LR_SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")
ENDLESS = ("constant", "inverse_sqrt")


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A linear warm-up to `peak`, then a decay to `minimum`, where it stays.

    kind: "constant" stays at the peak; "linear" and "cosine" (arXiv 1608.03983, without restarts) decay from the end
        of the warm-up to step `total_steps`; "wsd" (warm-up, stable, decay: arXiv 2404.06395) stays at the peak and
        decays linearly in the last `decay_steps` before `total_steps`; "inverse_sqrt" (arXiv 1706.03762) decays with
        the square root of the number of updates, as peak * sqrt(warmup_steps / step) (of one step where there is no
        warm-up), and does not end.

    Raises ValueError: an unknown kind, a minimum above the peak, steps that do not fit into each other.
    """

    leaves_out_skipped: ClassVar[bool] = False

    peak: float
    minimum: float = 0.0
    warmup_steps: int = 0
    total_steps: int | None = None
    kind: str = "constant"
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        raise_all("LearningRate", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.kind in LR_SCHEDULES,
            f"kind={self.kind!r} is unknown; known: {', '.join(LR_SCHEDULES)}",
        )
        yield (
            0 <= self.minimum <= self.peak,
            f"minimum={self.minimum} must be between 0 and peak={self.peak}",
        )
        yield self.warmup_steps >= 0, f"warmup_steps={self.warmup_steps} must be at least 0"
        if self.kind in ENDLESS or self.kind not in LR_SCHEDULES:
            return
        total = self.total_steps
        yield total is not None, f"kind={self.kind!r} ends: give total_steps"
        if total is None:
            return
        yield (
            total > self.warmup_steps,
            f"total_steps={total} must be more than warmup_steps={self.warmup_steps}",
        )
        if self.kind == "wsd":
            yield (
                self.decay_steps is not None and 1 <= self.decay_steps <= total - self.warmup_steps,
                f"decay_steps={self.decay_steps} of 'wsd' must be from 1 to total_steps({total}) - "
                f"warmup_steps({self.warmup_steps}) = {total - self.warmup_steps}",
            )

    def at(self, step: int) -> float:
        """The rate of the update before which `step` updates were made; the first warm-up step is not 0."""
        if step < self.warmup_steps:
            return self.peak * ((step + 1) / self.warmup_steps)
        if self.kind == "constant":
            return self.peak
        if self.kind == "inverse_sqrt":
            scale = max(1, self.warmup_steps)
            steps_after_warmup = step - self.warmup_steps
            return max(self.minimum, self.peak * math.sqrt(scale / (steps_after_warmup + scale)))
        assert self.total_steps is not None
        if self.kind == "wsd":
            decay_steps = self.decay_steps
        else:
            decay_steps = self.total_steps - self.warmup_steps
        assert decay_steps is not None
        # what remains of the decay, from 1 down to 0
        share = min(1.0, max(0.0, (self.total_steps - step) / decay_steps))
        # "linear" and "wsd" fall in a straight line
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.minimum + (self.peak - self.minimum) * share
