"""Which steps of a run are kept: the newest, multiples, one per so many hours, the best by a metric, tagged ones.

Pure but for `StepFacts`, which come from the manifests. `.retention.json` beside the steps remembers them, so that a
save reads one manifest and not those of all steps; without that file they are read again.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.parallel_state.config import raise_all

MODES = ("min", "max")


@dataclass(frozen=True)
class StepFacts:
    """What the manifest of a step says: when it was saved (seconds since 1970), and what was measured then."""

    time: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_run(cls, run: Mapping[str, Any]) -> "StepFacts":
        """From `run` of a manifest; what is no finite number there is left out."""
        metrics = run.get("metrics")
        if not isinstance(metrics, Mapping):
            metrics = {}
        time: Any = run.get("time")
        numbers = {name: value for name, value in metrics.items() if _is_number(value)}
        return cls(time if _is_number(time) else 0.0, numbers)


def _is_number(value: Any) -> bool:
    # True is an int to Python
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Numbers by name, as a manifest can hold them: inf and NaN are left out, they are nobody's best.

    Raises ValueError: a value that is no number.
    """
    numbers = {}
    for name, value in (metrics or {}).items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"metrics[{name!r}] is a {type(value).__name__}, no number; give a float"
            ) from None
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules that add up: a step is removed only if no rule keeps it.

    keep_last: newest complete steps. keep_every: multiples of it. keep_hours: the first step, and each that was saved
    so many hours after the last one kept by this. keep_best: a metric given to `save`; the keep_best_count steps with
    its smallest values ("max": largest) stay.
    Raises ValueError with every rule that is broken.
    """

    keep_last: int = 3
    keep_every: int | None = None
    keep_hours: float | None = None
    keep_best: str | None = None
    keep_best_count: int = 1
    keep_best_mode: str = "min"

    def __post_init__(self) -> None:
        hours = self.keep_hours
        mode = self.keep_best_mode
        rules = [
            (self.keep_last >= 1, f"keep_last={self.keep_last} must be at least 1"),
            (
                self.keep_every is None or self.keep_every >= 1,
                f"keep_every={self.keep_every} must be at least 1",
            ),
            (hours is None or hours > 0, f"keep_hours={hours} must be above 0"),
            (
                self.keep_best_count >= 1,
                f"keep_best_count={self.keep_best_count} must be at least 1",
            ),
            (mode in MODES, f"unknown keep_best_mode {mode!r}; known: {', '.join(MODES)}"),
        ]
        raise_all("Retention", rules)

    @property
    def reads_facts(self) -> bool:
        """Whether `protected` needs more than the numbers of the steps."""
        return self.keep_hours is not None or self.keep_best is not None

    def protected(self, steps: Iterable[int], facts: Mapping[int, StepFacts]) -> set[int]:
        """Those of `steps` that stay whatever is newer; not those of `keep_last`, which must be complete."""
        steps = sorted(steps)
        protected: set[int] = set()
        if self.keep_every is not None:
            protected.update(step for step in steps if step % self.keep_every == 0)
        if self.keep_hours is not None:
            protected.update(
                self._spaced([(facts[step].time, step) for step in steps if step in facts])
            )
        if self.keep_best is not None:
            protected.update(self._best(steps, facts))
        return protected

    def _best(self, steps: Iterable[int], facts: Mapping[int, StepFacts]) -> list[int]:
        assert self.keep_best is not None
        # the smallest values of the metric, or of its negative; equal values: the older step
        sign = 1 if self.keep_best_mode == "min" else -1
        known_steps = [
            step for step in steps if step in facts and self.keep_best in facts[step].metrics
        ]
        measured = [(sign * facts[step].metrics[self.keep_best], step) for step in known_steps]
        return [step for _, step in sorted(measured)[: self.keep_best_count]]

    def _spaced(self, times: Iterable[tuple[float, int]]) -> Iterable[int]:
        """Steps at least `keep_hours` apart; `times`: (seconds, step), ascending."""
        # so that the first step is kept
        last = -math.inf
        for time, step in times:
            if time - last >= 3600 * (self.keep_hours or 0):
                last = time
                yield step
