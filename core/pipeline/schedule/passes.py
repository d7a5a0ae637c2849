"""From one schedule to another: recompute added, forward only, some microbatches only. Standard library only."""

from collections.abc import Collection, Iterable, Iterator

from core.pipeline.schedule.actions import Action, Order, Schedule


def add_recompute(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """An R right before each I or B of `stages` (default: all) that has none yet: activation checkpointing.

    R needs no gradient, so it does not wait for one. It is left out where the backward follows its own F
    directly: the graph still exists.
    """

    def with_recompute(order: Order) -> Iterator[Action]:
        previous = None
        for action in order:
            kind, stage, microbatch = action
            is_selected = stages is None or stage in stages
            if kind in "IB" and is_selected and (stage, microbatch) not in schedule.recomputed:
                has_graph = previous == Action("F", stage, microbatch)
                if not has_graph:
                    yield Action("R", stage, microbatch)
            previous = action
            yield action

    return Schedule.make(schedule.placement, map(with_recompute, schedule.orders), schedule.name)


def without_recompute(schedule: Schedule) -> Schedule:
    """Without any R: every F keeps its graph."""
    orders = ([action for action in order if action.kind != "R"] for order in schedule.orders)
    return Schedule.make(schedule.placement, orders, schedule.name)


def add_gathers(schedule: Schedule) -> Schedule:
    """UNSHARD before the first F of each stage, RESHARD after its last I or B: sharded parameters (ZeRO-3) are
    gathered once per step and stay whole meanwhile, where memory allows it."""

    def with_gathers(order: Order) -> Iterator[Action]:
        last_use = {
            action.stage: index for index, action in enumerate(order) if action.kind in "FRIB"
        }
        unsharded: set[int] = set()
        for index, action in enumerate(order):
            if action.stage not in unsharded:
                unsharded.add(action.stage)
                yield Action("UNSHARD", action.stage)
            yield action
            if last_use.get(action.stage) == index:
                yield Action("RESHARD", action.stage)

    return Schedule.make(schedule.placement, map(with_gathers, schedule.orders), schedule.name)


def only_microbatches(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule without the microbatches from `microbatches` on: no action depends on another microbatch's."""

    def cut(order: Order) -> Iterator[Action]:
        for action in order:
            if action.microbatch is None or action.microbatch < microbatches:
                yield action

    return Schedule.make(schedule.placement, map(cut, schedule.orders), schedule.name)


def split_backward(schedule: Schedule) -> Schedule:
    """Every B as I and W, one after the other."""

    def split(order: Order) -> Iterator[Action]:
        for action in order:
            if action.kind == "B":
                yield action._replace(kind="I")
                yield action._replace(kind="W")
            else:
                yield action

    return Schedule.make(schedule.placement, map(split, schedule.orders), schedule.name)


def forward_only(placement: Iterable[int], ranks: int, microbatches: int) -> Schedule:
    """F of every stage, `ranks` microbatches of a stage before the next stage's: keeps every rank at work."""
    placement = tuple(placement)
    # waves of `ranks` microbatches: while the last of a wave is on its way, the first comes back for the next chunk
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    for first in range(0, microbatches, ranks):
        wave = range(first, min(first + ranks, microbatches))
        for stage, rank in enumerate(placement):
            orders[rank] += [Action("F", stage, microbatch) for microbatch in wave]
    return Schedule.make(placement, orders, "forward")
