"""Plays a schedule against costs: the oracle of every test. Refuses what is incomplete or never ends.

Standard library only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from core.pipeline.schedule.actions import Action, Schedule, check_placement
from core.pipeline.schedule.timeline import Event, Timeline

PerStage = float | Sequence[float]  # one number for all stages, or one per stage


@dataclass(frozen=True)
class Costs:
    """Of one stage and one microbatch; a number holds for all stages, a sequence names each stage's.

    F, I, W, R: time. comm: time from the end of an action until its message is on another rank.
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
        return value if isinstance(value, (int, float)) else value[stage]

    def divided(self, chunks: int) -> "Costs":
        """The costs of a rank's whole slice, as those of its `chunks` equal stages; comm stays."""
        each = {f.name: getattr(self, f.name) for f in fields(self)}
        return Costs(**{k: v if k == "comm" else v / chunks for k, v in each.items()})


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

    F, then either B or I and W, with R (at most once) between F and its I. Whether ranks wait for each
    other for ever is `play`'s to find.
    """
    check_placement(schedule.placement, schedule.ranks)
    count = schedule.microbatches if microbatches is None else microbatches
    seen: dict[tuple[str, int, int | None], None] = {}
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if action.kind in "FBIWR":
                _check_action(schedule, rank, action, count, seen)
                seen[action] = None
    for stage in range(schedule.stages):
        for m in range(count):
            halves = ("B",) if ("B", stage, m) in seen else ("I", "W")
            for kind in ("F", *halves):
                if (kind, stage, m) not in seen:
                    raise ValueError(
                        f"schedule {schedule.name!r} misses {Action(kind, stage, m)}: stage {stage} (rank "
                        f"{schedule.placement[stage]}) never does {kind} of microbatch {m} of {count}"
                    )


def check_gathers(schedule: Schedule) -> None:
    """Raise ValueError where a schedule says when parameters are whole (UNSHARD, RESHARD), but not for every action.

    Without any, modules gather for themselves, unit by unit.
    """
    if not any(action.kind == "UNSHARD" for order in schedule.orders for action in order):
        return
    for order in schedule.orders:
        whole: set[int] = set()
        for action in order:
            if action.kind == "UNSHARD":
                whole.add(action.stage)
            elif action.kind == "RESHARD":
                whole.discard(action.stage)
            elif action.kind in "FRIB" and action.stage not in whole:
                raise ValueError(
                    f"schedule {schedule.name!r} has gather actions, but none before {action}: stage {action.stage} "
                    f"of {schedule.stages} is not whole there; write UNSHARD and RESHARD for every stage "
                    "(passes.add_gathers), or none at all: its units are then gathered one by one"
                )


def _check_action(schedule: Schedule, rank: int, action: Action, count: int, seen: Mapping) -> None:
    kind, s, m = action
    where = f"schedule {schedule.name!r}, rank {rank}: {action}"
    if s >= schedule.stages or m is None or m >= count:
        raise ValueError(f"{where} is none of its {schedule.stages} stages and {count} microbatches")
    if schedule.placement[s] != rank:
        raise ValueError(f"{where} belongs to rank {schedule.placement[s]}, where stage {s} is placed")
    if action in seen or (kind in "IW" and ("B", s, m) in seen) or (kind == "B" and ("I", s, m) in seen):
        raise ValueError(f"{where} is repeated: a stage does each microbatch once")
    before = {"F": "", "R": "F", "I": "F", "B": "F", "W": "I"}[kind]
    if before and (before, s, m) not in seen:
        raise ValueError(f"{where} comes before {Action(before, s, m)}, whose result it needs")
    if kind == "R" and (("I", s, m) in seen or ("B", s, m) in seen):
        raise ValueError(f"{where} comes after the backward that would need it")


def _sources(schedule: Schedule, action: Action) -> list[tuple[str, int, int | None]]:
    """What must have ended on any rank before the action can start; a rank's own order covers the rest."""
    kind, s, m = action
    if kind == "F":
        return [("F", s - 1, m)] if s else []
    if kind == "I":
        return [("I", s + 1, m)] if s < schedule.stages - 1 else [("F", s, m)]
    return []


def play(schedule: Schedule, costs: Costs | None = None, *, fused_backward: bool = False) -> Played:
    """Every rank does its list in order, each action as soon as its inputs are there.

    B is I, its message, then W, as our executor runs it; with `fused_backward` the message leaves after W, as
    in most others.
    Raises ValueError: an action that never gets its input, with the circle of ranks that wait.
    """
    costs = costs or Costs()
    done: dict[tuple[str, int, int | None], float] = {}
    rows: list[list[Event]] = [[] for _ in schedule.orders]
    position, clock = [0] * schedule.ranks, [0.0] * schedule.ranks
    halves = {"B": ("I", "W")}

    def start(rank: int, action: Action) -> float | None:
        begin = clock[rank]
        for source in _sources(schedule, action if action.kind != "B" else action._replace(kind="I")):
            if source not in done:
                return None
            away = schedule.placement[source[1]] != rank
            begin = max(begin, done[source] + (costs.comm if away else 0.0))
        return begin

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                begin = start(rank, action)
                if begin is None:
                    break
                end = begin
                if action.kind in "FBIWR":
                    for half in halves.get(action.kind, (action.kind,)):
                        end += costs.at(half, action.stage)
                        done[half, action.stage, action.microbatch] = end
                    if fused_backward and action.kind == "B":
                        done["I", action.stage, action.microbatch] = end
                    rows[rank].append(Event(action, begin, end))
                clock[rank], moved = end, True
                position[rank] += 1
    if any(p < len(order) for p, order in zip(position, schedule.orders, strict=True)):
        raise ValueError(_circle(schedule, position, done))
    timeline = Timeline(tuple(map(tuple, rows)))
    memory = tuple(_memory(schedule, row, costs) for row in timeline.rows)
    return Played(timeline, tuple(max((held for _, held in m), default=0.0) for m in memory), memory)


def _memory(schedule: Schedule, row: Sequence[Event], costs: Costs) -> tuple[tuple[float, float], ...]:
    """(time, memory) of one rank: an F or R takes its memory when it starts, an I or W gives it when it ends; of a B
    the I ends first, and what waits for its W is there in between."""
    changes: list[tuple[float, float]] = []
    for (kind, s, m), start, end in row:
        again = (s, m) in schedule.recomputed
        saved, graph, waiting = (costs.at(name, s) for name in ("saved", "graph", "waiting"))
        if kind == "F":
            changes.append((start, saved if again else graph))
        elif kind == "R":
            changes.append((start, graph - saved))
        elif kind == "I":
            changes.append((end, waiting - graph))
        elif kind == "B":
            changes.append((end - costs.at("W", s), waiting - graph))
            changes.append((end, -waiting))
        else:
            changes.append((end, -waiting))
    held, curve = 0.0, []
    for time, change in changes:
        held += change
        curve.append((time, held))
    return tuple(curve)


def _circle(schedule: Schedule, position: Sequence[int], done: Mapping) -> str:
    """Follow who waits for whom until a rank comes back, or has ended without the action."""
    stuck = [r for r, order in enumerate(schedule.orders) if position[r] < len(order)]
    rank, path, text = stuck[0], [], []
    while rank not in path:
        path.append(rank)
        action = schedule.orders[rank][position[rank]]
        plain = action._replace(kind="I") if action.kind == "B" else action
        source = next(s for s in _sources(schedule, plain) if s not in done)
        away = schedule.placement[source[1]]
        text.append(f"rank {rank} stops at {action} and waits for {Action(*source)} of rank {away}")
        rank = away
        if rank not in stuck:
            return f"schedule {schedule.name!r} never ends: {', '.join(text)}, which has ended without it"
    circle = ", ".join(text[path.index(rank) :])
    return f"schedule {schedule.name!r} never ends: {circle}, which comes no sooner"
