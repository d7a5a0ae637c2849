"""The automatic schedule: measure two steps, search, give every rank the result, compare the third step with it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any

from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.state import ParallelState
from core.pipeline.schedule.actions import Schedule
from core.pipeline.schedule.integer_schedule import SchedulingProblem
from core.pipeline.schedule.memory import MemoryWatch, StageMemory, live_peaks
from core.pipeline.schedule.player import Costs, play
from core.pipeline.schedule.schedules import NAMED, candidates
from core.pipeline.schedule.timeline import Measured, Timeline
from core.pipeline.search.search import SearchResult, search

BYTE_COSTS = ("saved", "graph", "waiting")
MIB = 2**20
# a part of a step: if less than this is possible, the other ranks need not wait for a search
WORTH_SEARCHING = 0.01


def first_schedule(stages: Sequence[int], microbatches: int) -> Schedule:
    """What runs until the costs are known, on the placement `stages` (stage -> rank).

    The named schedule with the smallest bubble that holds no more than one microbatch per rank, or (a placement
    without a name) what the search finds for equal costs.
    """
    ranks = max(stages) + 1
    chunks = -(-len(stages) // ranks)
    equal_costs = Costs().divided(chunks)
    named = [
        schedule
        for schedule in candidates(stages, microbatches)
        if play(schedule, equal_costs).peak <= ranks + 0.5
    ]
    if named:
        return min(named, key=lambda schedule: play(schedule, equal_costs).makespan)
    return search(stages, microbatches, equal_costs, budget=1_000_000).schedule


def measured_costs(
    schedule: Schedule, timeline: Timeline, memory: Mapping[int, StageMemory]
) -> Costs:
    """Medians per stage of what a step took; an R that never ran costs what F does.

    Raises ValueError: a timeline without an F of every stage.
    """
    durations: dict[str, list[list[float]]] = {
        kind: [[] for _ in range(schedule.stages)] for kind in "FIWR"
    }
    for row in timeline.rows:
        for action, start, end in row:
            durations[action.kind][action.stage].append(end - start)
    if not all(durations["F"]):
        measured_stages = sum(map(bool, durations["F"]))
        raise ValueError(
            f"the timeline has {measured_stages} of {schedule.stages} stages; run a step first"
        )

    # the median: the first microbatches of a step are slower (allocation), and others may be disturbed
    per_stage: dict[str, Any] = {}
    for kind, by_stage in durations.items():
        per_stage[kind] = tuple(
            median(stage_durations or durations["F"][stage])
            for stage, stage_durations in enumerate(by_stage)
        )
    for name in BYTE_COSTS:
        per_stage[name] = tuple(
            float(getattr(memory[stage], name)) for stage in range(schedule.stages)
        )
    return Costs(**per_stage, comm=_message_delay(schedule, timeline))


def _message_delay(schedule: Schedule, timeline: Timeline) -> float:
    """The latency of a message: how long after its source an action starts whose rank had nothing else to do; the
    median."""
    end_times = {event.action: event.end for event in chain.from_iterable(timeline.rows)}
    delays = []
    for rank, row in enumerate(timeline.rows):
        free_since = 0.0
        for action, start, end in row:
            kind, stage, microbatch = action
            source_stage = stage - 1 if kind == "F" else stage + 1
            source = type(action)(kind, source_stage, microbatch)
            sent = end_times.get(source)
            if kind in "FI" and sent is not None:
                from_other_rank = schedule.placement[source_stage] != rank
                if from_other_rank and free_since < sent < start:
                    delays.append(start - sent)
            free_since = end
    if delays:
        return median(delays)
    return 0.0


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
    result: SearchResult | None = None
    steps: int = 0

    @property
    def watch(self) -> MemoryWatch | None:
        """What counts bytes, in the step in which they are counted."""
        if self.steps == 0:
            return self.memory
        return None

    @property
    def done(self) -> bool:
        """Whether the search is over and its prediction was compared."""
        return self.steps > 2

    def after_step(self, schedule: Schedule, measured: Measured) -> Schedule | None:
        """What to run from now on, or None. All-gathers over pp and, once, over the world.

        Raises ValueError, on every rank: the search failed on rank 0.
        """
        self.steps += 1
        if self.steps == 1:
            return None
        timeline = Timeline.of(all_gather_objects(measured, self.ps.group("pp")))
        if self.done:
            self._print_comparison(timeline)
            return None
        # bytes were counted in step 1, times measured in step 2
        memory: dict[int, StageMemory] = {}
        for rank_stages in all_gather_objects(self.memory.stages, self.ps.group("pp")):
            memory |= rank_stages

        # rank 0 searches; the others wait for its answer, so that it must answer whatever goes wrong
        text = ""
        problem = None
        if self.ps.rank == 0:
            try:
                self.result = self._search(
                    schedule, measured_costs(schedule, timeline, memory), memory
                )
                text = self.result.schedule.text()
                print(self.result.summary(" MiB"), flush=True)
            except Exception as error:
                problem = f"auto (memory in MiB): {type(error).__name__}: {error}"
        text, problem = all_gather_objects((text, problem), self.ps.world)[0]
        if problem:
            raise ValueError(problem)
        return Schedule.parse(text)

    def _search(
        self, schedule: Schedule, costs: Costs, memory: Mapping[int, StageMemory]
    ) -> SearchResult:
        """The best schedule found of which no more than the limit lives.

        The search counts what is held between actions. What lives beside it (`live_peaks`: the inside of actions,
        messages) depends on the schedule, which is not known yet. So a margin is taken off the limit: that of the
        first schedule, then that of what was found with it, last that of one microbatch at a time.
        """
        limit = self.limit
        # as much as the first schedule needs on its fullest rank
        if limit is None:
            limit = max(live_peaks(schedule, memory, self.depth))
        in_mebibytes: dict[str, Any] = {}
        for name in BYTE_COSTS:
            in_mebibytes[name] = tuple(
                costs.at(name, stage) / MIB for stage in range(schedule.stages)
            )
        costs = replace(costs, **in_mebibytes)

        problem = SchedulingProblem(schedule.placement, self.microbatches, costs, self.recomputed)
        smallest = problem.schedule(problem.one_by_one(), "one microbatch at a time")
        _refuse_too_little(limit, live_peaks(smallest, memory, self.depth))

        named = candidates(schedule.placement, self.microbatches)
        if schedule.name not in NAMED:
            named.append(schedule)
        margins = _memory_beside(schedule, costs, memory, self.depth)
        deadline = perf_counter() + self.seconds
        for _ in range(3):
            try:
                result = search(
                    schedule.placement,
                    self.microbatches,
                    costs,
                    recompute=self.recomputed,
                    memory_limit=[limit / MIB - margin for margin in margins],
                    seconds=max(0.0, deadline - perf_counter()),
                    enough=WORTH_SEARCHING,
                    candidates=named,
                )
            except ValueError:
                # nothing fits beside these margins; a schedule that holds less has smaller ones
                margins = _memory_beside(smallest, costs, memory, self.depth)
                continue
            beside = _memory_beside(result.schedule, costs, memory, self.depth)
            time_limit = self.seconds if result.time_limit else 0.0
            result = replace(result, memory_beside=beside, time_limit=time_limit)
            if max(live_peaks(result.schedule, memory, self.depth)) <= limit:
                return result
            margins = tuple(map(max, beside, margins))

        return self._one_by_one(smallest, problem, costs, memory, limit)

    def _one_by_one(
        self,
        smallest: Schedule,
        problem: SchedulingProblem,
        costs: Costs,
        memory: Mapping[int, StageMemory],
        limit: float,
    ) -> SearchResult:
        """One microbatch at a time: nothing faster fits."""
        played = play(smallest, costs)
        beside = _memory_beside(smallest, costs, memory, self.depth)
        limits = tuple(limit / MIB - margin for margin in beside)
        steps = ((smallest.name, played.makespan),)
        return SearchResult(
            smallest,
            played,
            max(problem.work),
            problem.bound(),
            limits,
            steps,
            0,
            memory_beside=beside,
        )

    def _print_comparison(self, timeline: Timeline) -> None:
        if self.result is not None:
            played = self.result.played
            print(
                f"auto: step predicted {1e3 * played.makespan:.1f} ms, measured {1e3 * timeline.makespan:.1f} ms; "
                f"bubble predicted {100 * played.bubble:.1f} %, measured {100 * timeline.bubble:.1f} %",
                flush=True,
            )


def _memory_beside(
    schedule: Schedule, costs: Costs, memory: Mapping[int, StageMemory], depth: int
) -> tuple[float, ...]:
    """MiB that live on each rank at most, beyond what the player counts."""
    peaks = play(schedule, costs).peaks
    live = live_peaks(schedule, memory, depth)
    return tuple(live_bytes / MIB - peak for live_bytes, peak in zip(live, peaks, strict=True))


def _refuse_too_little(limit: float, smallest: Sequence[float]) -> None:
    """Raise ValueError where not even one microbatch at a time stays within the limit."""
    rank = max(range(len(smallest)), key=lambda r: smallest[r])
    if smallest[rank] > limit:
        raise ValueError(
            f"no schedule meets the memory limit of {limit:.0f} bytes of rank {rank}: one microbatch at a time "
            f"already takes {math.ceil(smallest[rank])} bytes, messages and the inside of an action included, which "
            "is the smallest limit that works. Raise the limit, recompute more stages, or use smaller microbatches"
        )
