"""Plays a schedule against costs: the oracle of every test. Refuses what is incomplete or deadlocks.

Standard library only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain

from core.pipeline.schedule.actions import Action, Schedule, check_placement
from core.pipeline.schedule.timeline import Event, Timeline

# one number for all stages, or one per stage
PerStage = float | Sequence[float]
Done = tuple[str, int, int | None]  # kind, stage, microbatch


@dataclass(frozen=True)
class Costs:
    """Of one stage and one microbatch; a number holds for all stages, a sequence names each stage's.

    F, I, W, R: time. comm: latency, from the end of an action until its message is on another rank.
    saved: memory that F holds when an R will follow (the stage's input). graph: memory of a graph, after an F
    without R, and after R. waiting: memory that waits between I and W (inputs and output gradients).
    """

    F: PerStage = 1.0
    I: PerStage = 1.0  # noqa: E741  (the field's own letter)
    W: PerStage = 1.0
    R: PerStage = 1.0
    comm: float = 0.0
    saved: PerStage = 0.0
    graph: PerStage = 1.0
    waiting: PerStage = 1.0

    def at(self, name: str, stage: int) -> float:
        """Cost `name` of a stage."""
        value = getattr(self, name)
        if isinstance(value, (int, float)):
            return value
        return value[stage]

    def divided(self, chunks: int) -> "Costs":
        """The costs of a rank's whole slice, as those of its `chunks` equal stages; comm stays."""
        costs = {}
        for cost in fields(self):
            value = getattr(self, cost.name)
            costs[cost.name] = value if cost.name == "comm" else value / chunks
        return Costs(**costs)


@dataclass(frozen=True)
class Played:
    """What a schedule comes to.

    timeline: when each action runs. peaks[r]: the most memory rank r holds. memory[r]: (time, memory) after
    each change.
    """

    timeline: Timeline
    peaks: tuple[float, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...] = field(repr=False)

    @property
    def makespan(self) -> float:
        """Time of the whole step."""
        return self.timeline.makespan

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which nothing runs, 0 to 1."""
        return self.timeline.bubble

    @property
    def peak(self) -> float:
        """The most memory any rank holds."""
        return max(self.peaks)


def check(schedule: Schedule, microbatches: int | None = None) -> None:
    """Raise ValueError, naming the action, unless every stage does each microbatch exactly once, on its own rank.

    F, then either B or I and W, with R (at most once) between F and its I. Deadlocks are found by `play`.
    """
    check_placement(schedule.placement, schedule.ranks)
    count = schedule.microbatches if microbatches is None else microbatches
    # in the order of each rank: whatever an action needs of its own stage must stand before it
    done: dict[Done, None] = {}
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if action.kind in "FBIWR":
                _check_action(schedule, rank, action, count, done)
                done[action] = None
    for stage in range(schedule.stages):
        for microbatch in range(count):
            backward = ("B",) if ("B", stage, microbatch) in done else ("I", "W")
            for kind in ("F", *backward):
                if (kind, stage, microbatch) not in done:
                    raise ValueError(
                        f"schedule {schedule.name!r} misses {Action(kind, stage, microbatch)}: stage {stage} (rank "
                        f"{schedule.placement[stage]}) never does {kind} of microbatch {microbatch} of {count}"
                    )


def check_gathers(schedule: Schedule) -> None:
    """Raise ValueError where a schedule says when parameters are whole (UNSHARD, RESHARD), but not for every action.

    Without any, modules gather their own parameters, unit by unit.
    """
    if not any(action.kind == "UNSHARD" for action in chain.from_iterable(schedule.orders)):
        return
    for order in schedule.orders:
        unsharded: set[int] = set()
        for action in order:
            if action.kind == "UNSHARD":
                unsharded.add(action.stage)
            elif action.kind == "RESHARD":
                unsharded.discard(action.stage)
            elif action.kind in "FRIB" and action.stage not in unsharded:
                raise ValueError(
                    f"schedule {schedule.name!r} has gather actions, but none before {action}: stage {action.stage} "
                    f"of {schedule.stages} is not whole there; write UNSHARD and RESHARD for every stage "
                    "(passes.add_gathers), or none at all: its units are then gathered one by one"
                )


def _check_action(schedule: Schedule, rank: int, action: Action, count: int, done: Mapping) -> None:
    kind, stage, microbatch = action
    subject = f"schedule {schedule.name!r}, rank {rank}: {action}"
    if stage >= schedule.stages or microbatch is None or microbatch >= count:
        raise ValueError(
            f"{subject} is none of its {schedule.stages} stages and {count} microbatches"
        )
    if schedule.placement[stage] != rank:
        raise ValueError(
            f"{subject} belongs to rank {schedule.placement[stage]}, where stage {stage} is placed"
        )

    # a backward is whole or in two halves, never both
    fused_is_done = ("B", stage, microbatch) in done
    input_is_done = ("I", stage, microbatch) in done
    if action in done or (kind in "IW" and fused_is_done) or (kind == "B" and input_is_done):
        raise ValueError(f"{subject} is repeated: a stage does each microbatch once")

    needed = {"F": "", "R": "F", "I": "F", "B": "F", "W": "I"}[kind]
    if needed and (needed, stage, microbatch) not in done:
        raise ValueError(
            f"{subject} comes before {Action(needed, stage, microbatch)}, whose result it needs"
        )
    if kind == "R" and (input_is_done or fused_is_done):
        raise ValueError(f"{subject} comes after the backward that would need it")


def _sources(schedule: Schedule, action: Action) -> list[Done]:
    """What must have ended on any rank before the action can start; a rank's own order covers the rest."""
    kind, stage, microbatch = action
    if kind == "F" and stage > 0:
        return [("F", stage - 1, microbatch)]
    if kind in ("I", "B"):
        is_last = stage == schedule.stages - 1
        if is_last:  # the gradient of the loss
            return [("F", stage, microbatch)]
        return [("I", stage + 1, microbatch)]
    return []


class _Player:
    """The state of all ranks while a schedule is played."""

    def __init__(self, schedule: Schedule, costs: Costs, *, fused_backward: bool) -> None:
        self.schedule = schedule
        self.costs = costs
        self.fused_backward = fused_backward
        self.end_times: dict[Done, float] = {}
        self.rows: list[list[Event]] = [[] for _ in schedule.orders]
        # per rank
        self.position = [0] * schedule.ranks
        self.clock = [0.0] * schedule.ranks

    def start_time(self, rank: int, action: Action) -> float | None:
        """When a rank can start an action; None while an input is not computed."""
        begin = self.clock[rank]
        for source in _sources(self.schedule, action):
            if source not in self.end_times:
                return None
            _, source_stage, _ = source
            arrival = self.end_times[source]
            # the latency of a message
            if self.schedule.placement[source_stage] != rank:
                arrival += self.costs.comm
            begin = max(begin, arrival)
        return begin

    def do(self, rank: int, action: Action, begin: float) -> None:
        """Play one action from `begin` on."""
        kind, stage, microbatch = action
        end = begin
        # communication takes no time here: `comm` is added to the arrival
        if kind in "FBIWR":
            halves = "IW" if kind == "B" else kind
            for half in halves:
                end += self.costs.at(half, stage)
                self.end_times[half, stage, microbatch] = end
            # the message leaves after W
            if self.fused_backward and kind == "B":
                self.end_times["I", stage, microbatch] = end
            self.rows[rank].append(Event(action, begin, end))
        self.clock[rank] = end
        self.position[rank] += 1

    def run(self) -> None:
        """Let every rank go as far as its inputs allow, again and again, until no rank moves."""
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(self.schedule.orders):
                while self.position[rank] < len(order):
                    action = order[self.position[rank]]
                    begin = self.start_time(rank, action)
                    if begin is None:
                        break
                    self.do(rank, action, begin)
                    moved = True


def play(schedule: Schedule, costs: Costs | None = None, *, fused_backward: bool = False) -> Played:
    """Every rank does its list in order, each action as soon as its inputs are there.

    B is I, its message, then W, as our executor runs it; with `fused_backward` the message leaves after W, as
    in most others.
    Raises ValueError: a deadlock, with the circle of ranks that wait for each other.
    """
    costs = costs or Costs()
    player = _Player(schedule, costs, fused_backward=fused_backward)
    player.run()
    lengths = map(len, schedule.orders)
    if any(position < length for position, length in zip(player.position, lengths, strict=True)):
        raise ValueError(_describe_deadlock(schedule, player.position, player.end_times))
    timeline = Timeline(tuple(map(tuple, player.rows)))
    memory = tuple(_memory_curve(schedule, row, costs) for row in timeline.rows)
    peaks = tuple(max((amount for _, amount in curve), default=0.0) for curve in memory)
    return Played(timeline, peaks, memory)


def _memory_curve(
    schedule: Schedule, row: Sequence[Event], costs: Costs
) -> tuple[tuple[float, float], ...]:
    """(time, memory) of one rank: an F or R takes its memory when it starts, an I or W gives it when it ends; of a B
    the I ends first, and what waits for its W is there in between."""
    changes: list[tuple[float, float]] = []
    for (kind, stage, microbatch), start, end in row:
        recomputed = (stage, microbatch) in schedule.recomputed
        saved, graph, waiting = (costs.at(name, stage) for name in ("saved", "graph", "waiting"))
        if kind == "F":
            changes.append((start, saved if recomputed else graph))
        elif kind == "R":
            changes.append((start, graph - saved))
        elif kind == "I":
            changes.append((end, waiting - graph))
        elif kind == "B":
            changes.append((end - costs.at("W", stage), waiting - graph))
            changes.append((end, -waiting))
        else:
            changes.append((end, -waiting))
    memory = 0.0
    curve = []
    for time, change in changes:
        memory += change
        curve.append((time, memory))
    return tuple(curve)


def _describe_deadlock(schedule: Schedule, position: Sequence[int], done: Mapping) -> str:
    """Follow who waits for whom until a rank comes back, or has ended without the action."""
    stuck_ranks = [
        rank for rank, order in enumerate(schedule.orders) if position[rank] < len(order)
    ]
    rank = stuck_ranks[0]
    path = []
    waits = []
    while rank not in path:
        path.append(rank)
        action = schedule.orders[rank][position[rank]]
        missing = next(source for source in _sources(schedule, action) if source not in done)
        source_rank = schedule.placement[missing[1]]
        waits.append(
            f"rank {rank} stops at {action} and waits for {Action(*missing)} of rank {source_rank}"
        )
        rank = source_rank
        if rank not in stuck_ranks:
            return f"schedule {schedule.name!r} never ends: {', '.join(waits)}, which has ended without it"
    circle = ", ".join(waits[path.index(rank) :])
    return f"schedule {schedule.name!r} never ends: {circle}, which comes no sooner"
