"""The automatic schedule: measure two steps, search, tell every rank, and say how well the prediction held."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.state import ParallelState
from core.pipeline.schedule.actions import Schedule
from core.pipeline.schedule.integer_schedule import Flat
from core.pipeline.schedule.memory import MemoryWatch, StageMemory, live_peaks
from core.pipeline.schedule.player import Costs, play
from core.pipeline.schedule.schedules import NAMED, candidates
from core.pipeline.schedule.timeline import Measured, Timeline
from core.pipeline.search.search import Found, search

MEMORY = ("saved", "graph", "waiting")  # those of the costs that are bytes
MIB = 2**20
ENOUGH = 0.01  # more than this part of a step must be possible, for all other ranks to wait for a search


def first_schedule(stages: Sequence[int], microbatches: int) -> Schedule:
    """What runs until the costs are known: the named schedule with the smallest bubble that holds no more than one
    microbatch per rank, or (a placement without a name) what the search finds for equal costs."""
    ranks = max(stages) + 1
    each = Costs().divided(-(-len(stages) // ranks))
    named = [s for s in candidates(stages, microbatches) if play(s, each).peak <= ranks + 0.5]
    if named:
        return min(named, key=lambda s: play(s, each).makespan)
    return search(stages, microbatches, each, budget=1_000_000).schedule


def measured_costs(schedule: Schedule, timeline: Timeline, memory: Mapping[int, StageMemory]) -> Costs:
    """Medians per stage of what a step took; an R that never ran costs what F does."""
    times: dict[str, list[list[float]]] = {k: [[] for _ in range(schedule.stages)] for k in "FIWR"}
    for row in timeline.rows:
        for action, start, end in row:
            times[action.kind][action.stage].append(end - start)
    if not all(times["F"]):
        raise ValueError(
            f"the timeline has {sum(map(bool, times['F']))} of {schedule.stages} stages; run a step first"
        )
    per_stage: dict[str, Any] = {
        kind: tuple(median(seen) if seen else median(times["F"][s]) for s, seen in enumerate(times[kind]))
        for kind in "FIWR"
    }
    for name in MEMORY:
        per_stage[name] = tuple(float(getattr(memory[s], name)) for s in range(schedule.stages))
    return Costs(**per_stage, comm=_delay(schedule, timeline))


def _delay(schedule: Schedule, timeline: Timeline) -> float:
    """How long after its source an action starts whose rank had nothing else to do: the median."""
    ends = {event.action: event.end for row in timeline.rows for event in row}
    waits = []
    for rank, row in enumerate(timeline.rows):
        free = 0.0
        for action, start, end in row:
            kind, s, m = action
            source = type(action)(kind, s - 1 if kind == "F" else s + 1, m)
            sent = ends.get(source)
            if kind in "FI" and sent is not None and schedule.placement[source.stage] != rank and free < sent < start:
                waits.append(start - sent)
            free = end
    return median(waits) if waits else 0.0


@dataclass
class Tuner:
    """After the first step of a pipeline (memory) and the second (times), a schedule for the following ones.

    limit: bytes that may live on a rank, beside parameters, gradients and the batch; by default what does under the
    first schedule, on its fullest rank. depth: receives posted ahead. seconds: how long rank 0 may search while the
    others wait. recomputed: stages with an R.
    """

    ps: ParallelState
    microbatches: int
    limit: float | None
    depth: int
    seconds: float = 10.0
    recomputed: Sequence[int] = ()
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    found: Found | None = None
    steps: int = 0

    @property
    def watch(self) -> MemoryWatch | None:
        """What counts bytes, in the step in which they are counted."""
        return self.memory if self.steps == 0 else None

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do or to say."""
        return self.steps > 2

    def after_step(self, schedule: Schedule, measured: Measured) -> Schedule | None:
        """What to run from now on, or None. All-gathers over pp and, once, over the world."""
        self.steps += 1
        if self.steps == 1:
            return None
        timeline = Timeline.of(all_gather_objects(measured, self.ps.group("pp")))
        if self.done:
            self._compare(timeline)
            return None
        memory: dict[int, StageMemory] = {}
        for part in all_gather_objects(self.memory.stages, self.ps.group("pp")):
            memory |= part
        text, error = "", None
        if self.ps.rank == 0:
            try:
                self.found = self._search(schedule, measured_costs(schedule, timeline, memory), memory)
                text = self.found.schedule.text()
                print(self.found.summary(" MiB"), flush=True)
            except Exception as problem:  # the others wait for the answer, whatever it is
                error = f"auto (memory in MiB): {type(problem).__name__}: {problem}"
        text, error = all_gather_objects((text, error), self.ps.world)[0]
        if error:
            raise ValueError(error)
        return Schedule.parse(text)

    def _search(self, schedule: Schedule, costs: Costs, memory: Mapping[int, StageMemory]) -> Found:
        """The best schedule found of which no more than the limit lives.

        The search knows what is held between actions; what lives beside it (`live_peaks`) depends on the schedule
        and is taken off the limit: of the first schedule, then of what was found, last of one microbatch at a time.
        """
        limit = max(live_peaks(schedule, memory, self.depth)) if self.limit is None else self.limit
        mebi: dict[str, Any] = {
            name: tuple(costs.at(name, s) / MIB for s in range(schedule.stages)) for name in MEMORY
        }
        costs = replace(costs, **mebi)
        named = candidates(schedule.placement, self.microbatches)
        flat = Flat(schedule.placement, self.microbatches, costs, self.recomputed)
        least = flat.schedule(flat.one_by_one(), "one microbatch at a time")
        _refuse_too_little(limit, live_peaks(least, memory, self.depth))
        margins = _margins(schedule, costs, memory, self.depth)
        end = perf_counter() + self.seconds
        for _ in range(3):
            try:
                found = search(
                    schedule.placement,
                    self.microbatches,
                    costs,
                    recompute=self.recomputed,
                    memory_limit=[limit / MIB - margin for margin in margins],
                    seconds=max(0.0, end - perf_counter()),
                    enough=ENOUGH,
                    candidates=[*named, schedule] if schedule.name not in NAMED else named,
                )
            except ValueError:  # less would live beside a schedule that holds less
                margins = _margins(least, costs, memory, self.depth)
                continue
            real = _margins(found.schedule, costs, memory, self.depth)
            found = replace(found, beside=real, cut=self.seconds if found.cut else 0.0)
            if max(live_peaks(found.schedule, memory, self.depth)) <= limit:
                return found
            margins = tuple(map(max, real, margins))
        steps = ((least.name, play(least, costs).makespan),)
        beside = _margins(least, costs, memory, self.depth)
        limits = tuple(limit / MIB - each for each in beside)
        return Found(least, play(least, costs), max(flat.work), flat.bound(), limits, steps, 0, beside=beside)

    def _compare(self, timeline: Timeline) -> None:
        if self.found is not None:
            played = self.found.played
            print(
                f"auto: step predicted {1e3 * played.makespan:.1f} ms, measured {1e3 * timeline.makespan:.1f} ms; "
                f"bubble predicted {100 * played.bubble:.1f} %, measured {100 * timeline.bubble:.1f} %",
                flush=True,
            )


def _margins(schedule: Schedule, costs: Costs, memory: Mapping[int, StageMemory], depth: int) -> tuple[float, ...]:
    """MiB that live on each rank at most, beyond what the player counts."""
    live = live_peaks(schedule, memory, depth)
    return tuple(b / MIB - held for b, held in zip(live, play(schedule, costs).peaks, strict=True))


def _refuse_too_little(limit: float, least: Sequence[float]) -> None:
    """Raise ValueError where not even one microbatch at a time stays within the limit."""
    rank = max(range(len(least)), key=lambda r: least[r])
    if least[rank] > limit:
        raise ValueError(
            f"no schedule meets the memory limit {limit / MIB:g} of rank {rank}: one microbatch at a time already "
            f"takes {least[rank] / MIB:.6g}, messages and the inside of an action included; the smallest limit that "
            f"works is {least[rank]:.0f} bytes. Raise the limit, recompute more stages, or use smaller microbatches"
        )
