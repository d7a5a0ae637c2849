"""When each rank did what: the one form of a prediction and of a measurement. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from core.pipeline.schedule.actions import Action


class Event(NamedTuple):
    """One action on one rank, from start to end (seconds, or the units of the costs)."""

    action: Action
    start: float
    end: float


class Measured(NamedTuple):
    """One rank's events since it began a step, and how long it took until a collective let all ranks go."""

    events: tuple[Event, ...] = ()
    length: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """rows[r]: the events of rank r, in order; time 0 is the start of the step on the rank that was first."""

    rows: tuple[tuple[Event, ...], ...]

    @classmethod
    def of(cls, measurements: Sequence[Measured]) -> "Timeline":
        """From the measurements of all ranks.

        Ranks do not begin at one time, nor do their clocks agree. But they leave the last collective together: the
        end of the step is the common moment by which they are aligned.
        """
        longest = max(measured.length for measured in measurements)
        return cls(
            tuple(_delayed(measured.events, longest - measured.length) for measured in measurements)
        )

    @property
    def makespan(self) -> float:
        """End of the last event."""
        return max((event.end for event in chain.from_iterable(self.rows)), default=0.0)

    def busy(self, rank: int) -> float:
        """Time that a rank spent in its events."""
        return sum(event.end - event.start for event in self.rows[rank])

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which nothing ran, 0 to 1."""
        total = len(self.rows) * self.makespan
        if not total:
            return 0.0
        return 1 - sum(map(self.busy, range(len(self.rows)))) / total


def _delayed(events: tuple[Event, ...], delay: float) -> tuple[Event, ...]:
    return tuple(Event(action, start + delay, end + delay) for action, start, end in events)
