"""When each rank did what: the one form of a prediction and of a measurement. Standard library only."""

from dataclasses import dataclass
from typing import NamedTuple

from core.pipeline.actions import Action


class Event(NamedTuple):
    """One action on one rank, from start to end (seconds, or the units of the costs)."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """rows[r]: the events of rank r, in order; time 0 is the start of the step."""

    rows: tuple[tuple[Event, ...], ...]

    @property
    def makespan(self) -> float:
        """End of the last event."""
        return max((event.end for row in self.rows for event in row), default=0.0)

    def busy(self, rank: int) -> float:
        """Time that a rank spent in its events."""
        return sum(event.end - event.start for event in self.rows[rank])

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which nothing ran, 0 to 1."""
        total = len(self.rows) * self.makespan
        return 1 - sum(map(self.busy, range(len(self.rows)))) / total if total else 0.0
