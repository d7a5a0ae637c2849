"""From one schedule to another: recompute added, forward only, some microbatches only. Standard library only."""

from collections.abc import Collection, Iterable, Iterator

from core.pipeline.schedule.actions import Action, Order, Schedule


def add_recompute(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """An R right before each I or B of `stages` (default: all) that has none yet.

    R needs no gradient, so it does not wait for one. It is left out where the backward follows its own F
    directly: the graph is still there.
    """

    def row(order: Order) -> Iterator[Action]:
        last = None
        for action in order:
            kind, s, m = action
            wanted = kind in "IB" and (stages is None or s in stages) and (s, m) not in schedule.recomputed
            if wanted and last != Action("F", s, m):
                yield Action("R", s, m)
            last = action
            yield action

    return Schedule.make(schedule.placement, map(row, schedule.orders), schedule.name)


def without_recompute(schedule: Schedule) -> Schedule:
    """Without any R: every F keeps its graph."""
    orders = ([a for a in order if a.kind != "R"] for order in schedule.orders)
    return Schedule.make(schedule.placement, orders, schedule.name)


def add_gathers(schedule: Schedule) -> Schedule:
    """UNSHARD before the first F of each stage, RESHARD after its last I or B: sharded parameters (ZeRO-3) are
    gathered once per step and stay whole meanwhile, where memory allows it."""

    def row(order: Order) -> Iterator[Action]:
        last = {action.stage: i for i, action in enumerate(order) if action.kind in "FRIB"}
        seen: set[int] = set()
        for i, action in enumerate(order):
            if action.stage not in seen:
                seen.add(action.stage)
                yield Action("UNSHARD", action.stage)
            yield action
            if last.get(action.stage) == i:
                yield Action("RESHARD", action.stage)

    return Schedule.make(schedule.placement, map(row, schedule.orders), schedule.name)


def only_microbatches(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule without the microbatches from `microbatches` on: no action depends on another microbatch's."""
    orders = ([a for a in order if a.microbatch is None or a.microbatch < microbatches] for order in schedule.orders)
    return Schedule.make(schedule.placement, orders, schedule.name)


def split_backward(schedule: Schedule) -> Schedule:
    """Every B as I and W, one after the other."""

    def row(order: Order) -> Iterator[Action]:
        for action in order:
            yield from (action._replace(kind=k) for k in "IW") if action.kind == "B" else (action,)

    return Schedule.make(schedule.placement, map(row, schedule.orders), schedule.name)


def forward_only(placement: Iterable[int], ranks: int, microbatches: int) -> Schedule:
    """F of every stage, `ranks` microbatches of a stage before the next stage's: keeps every rank at work."""
    placement = tuple(placement)
    mine = [[s for s, owner in enumerate(placement) if owner == rank] for rank in range(ranks)]
    waves = [range(first, min(first + ranks, microbatches)) for first in range(0, microbatches, ranks)]
    orders = ([Action("F", s, m) for wave in waves for s in stages for m in wave] for stages in mine)
    return Schedule.make(placement, orders, "forward")
