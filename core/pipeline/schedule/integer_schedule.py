"""A schedule as lists of integers: what the search scores thousands of times. Standard library only.

The action of some kind of stage s on microbatch m, of M, is packed into the integer 4 (s M + m) + kind, where kind is
0 F, 1 R, 2 I, 3 W. So the lowest two bits are the kind, and what an action needs on its own stage (F before R
before I before W) is its number minus one. Integer orders are in full form: every microbatch of a recomputed stage
has its R, also one whose F, R and I stand together. There R costs nothing, as F keeps its graph; `schedule` leaves
it out.
"""

from collections.abc import Collection, Sequence

from core.pipeline.schedule.actions import Action, Schedule
from core.pipeline.schedule.passes import add_recompute, split_backward
from core.pipeline.schedule.player import Costs

F, R, I, W = range(4)  # noqa: E741  (the kinds' own letters)
KINDS = "FRIW"
KIND_BITS = 3  # action & KIND_BITS is its kind
NOT_DONE = -1.0
IntegerOrders = list[list[int]]  # per rank


class SchedulingProblem:
    """Placement, microbatches and costs in flat lists indexed by action, and the fast twin of `play`.

    work[rank]: time of all its actions. time_per_microbatch: of the busiest rank.
    duration[action]. source[action]: the action of another stage whose result it needs (-1: none). delay[action]: how
    long that result travels. memory_change[action]: F and R take memory when they start, I and W when they end.
    """

    def __init__(
        self,
        placement: Sequence[int],
        microbatches: int,
        costs: Costs,
        recompute: Collection[int] = (),
    ) -> None:
        self.placement = tuple(placement)
        self.microbatches = microbatches
        self.stages = len(self.placement)
        self.ranks = max(self.placement) + 1
        self.recomputed = [stage in recompute for stage in range(self.stages)]
        self.stages_of: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.placement):
            self.stages_of[rank].append(stage)

        # from an action to the same of the next stage
        self.stride = 4 * microbatches
        self.size = self.stride * self.stages
        # F, I, W of every stage, and R of those that are recomputed
        self.actions = microbatches * (3 * self.stages + sum(self.recomputed))
        self.duration = [0.0] * self.size
        self.delay = [0.0] * self.size
        self.memory_change = [0.0] * self.size
        self.source = [-1] * self.size
        self.graph = [0.0] * self.stages
        for stage in range(self.stages):
            self._fill_stage(stage, costs)
        self.work = [microbatches * sum(map(self.stage_work, stages)) for stages in self.stages_of]
        self.time_per_microbatch = max(self.work) / max(1, microbatches)

    def _fill_stage(self, stage: int, costs: Costs) -> None:
        saved, graph, waiting = (costs.at(name, stage) for name in ("saved", "graph", "waiting"))
        self.graph[stage] = graph
        # activation checkpointing: F keeps the stage's input, R makes the graph
        after_forward = saved if self.recomputed[stage] else graph
        # of F, R, I, W
        memory_changes = (after_forward, graph - saved, waiting - graph, -waiting)
        durations = [costs.at(name, stage) for name in KINDS]
        for first in range(stage * self.stride, (stage + 1) * self.stride, 4):
            self.duration[first : first + 4] = durations
            self.memory_change[first : first + 4] = memory_changes
            if stage:
                self.source[first + F] = first + F - self.stride
            if stage < self.stages - 1:
                self.source[first + I] = first + I + self.stride
            else:  # the gradient of the loss
                self.source[first + I] = first + F
            for kind in (F, I):
                source = self.source[first + kind]
                if source >= 0 and self.placement[source // self.stride] != self.placement[stage]:
                    self.delay[first + kind] = costs.comm

    def stage_work(self, stage: int) -> float:
        """Time of everything that a stage does for a microbatch, R included."""
        first = stage * self.stride
        kinds = (F, R, I, W) if self.recomputed[stage] else (F, I, W)
        return sum(self.duration[first + kind] for kind in kinds)

    def bound(self) -> float:
        """A lower bound of every schedule's time: a rank's first F waits for the stages before it, then the rank has
        all its work to do.

        R is left out where I follows F directly: but then the rank waits at least for the next stage's F and I.
        """
        bound = 0.0
        for stages, work in zip(self.stages_of, self.work, strict=True):
            for stage in stages:
                if not self.recomputed[stage]:
                    continue
                first = stage * self.stride
                following = (stage + 1) * self.stride
                wait = 0.0
                if stage < self.stages - 1:
                    wait = self.duration[following + F] + self.duration[following + I]
                work -= self.microbatches * max(0.0, self.duration[first + R] - wait)
            until_first = 0.0
            for stage in range(stages[0]):
                until_first += (
                    self.duration[stage * self.stride] + self.delay[(stage + 1) * self.stride]
                )
            bound = max(bound, until_first + work)
        return bound

    def action(self, kind: int, stage: int, microbatch: int) -> int:
        """The number of an action."""
        return stage * self.stride + 4 * microbatch + kind

    def rank_costs(self, order: list[int]) -> tuple[list[float], float]:
        """(time of each action, peak memory) of one rank's order. A hot path of the search."""
        memory_change = self.memory_change
        durations = list(map(self.duration.__getitem__, order))
        memory = peak = 0.0
        last_forward = len(order) - 2
        free_recompute = -1
        for index, action in enumerate(order):
            if (
                action & KIND_BITS == F
                and index < last_forward
                and order[index + 2] == action + I
                and order[index + 1] == action + R
            ):
                # F R I in a row: F keeps its graph at once, and R takes neither time nor memory
                memory += self.graph[action // self.stride]
                free_recompute = action + R
                durations[index + 1] = 0.0
            elif action != free_recompute:
                memory += memory_change[action]
            if memory > peak:
                peak = memory
        return durations, peak

    def end_times(
        self, orders: IntegerOrders, durations: list[list[float]]
    ) -> tuple[float, list[float]] | None:
        """(makespan, end of each action) if each rank does its list in order; None for a deadlock.

        The hottest path of the search: every rank runs until it needs a result that is not there, and leaves its
        number in `end` of that action, so that whoever does it knows whom to wake.
        """
        source = self.source
        delay = self.delay
        # NOT_DONE, or -2 - rank: not done, and that rank waits for it
        end = [NOT_DONE] * self.size
        position = [0] * self.ranks
        clock = [0.0] * self.ranks
        ready = list(range(self.ranks))
        while ready:
            rank = ready.pop()
            order = orders[rank]
            times = durations[rank]
            now = clock[rank]
            for index in range(position[rank], len(order)):
                action = order[index]
                needed = source[action]
                if needed >= 0:
                    arrival = end[needed]
                    if arrival < 0:
                        end[needed], position[rank] = -2.0 - rank, index
                        break
                    arrival += delay[action]
                    if arrival > now:
                        now = arrival
                now += times[index]
                waiter = end[action]
                end[action] = now
                if waiter < NOT_DONE:
                    ready.append(int(-2 - waiter))
            else:
                position[rank] = len(order)
            clock[rank] = now
        if any(index < len(order) for index, order in zip(position, orders, strict=True)):
            return None
        return max(clock), end

    def score(self, orders: IntegerOrders) -> tuple[float, list[float]] | None:
        """(makespan, peak memory of each rank), equal to `play`'s; None for a deadlock."""
        durations = []
        peaks = []
        for order in orders:
            rank_durations, peak = self.rank_costs(order)
            durations.append(rank_durations)
            peaks.append(peak)
        ends = self.end_times(orders, durations)
        if ends is None:
            return None
        makespan, _ = ends
        return makespan, peaks

    def schedule(self, orders: IntegerOrders, name: str = "auto") -> Schedule:
        """Integers to actions, without the R that cost nothing."""

        def decode(order: list[int]) -> list[Action]:
            free_recomputes = set()
            for before, action, after in zip(order, order[1:], order[2:], strict=False):
                if action & KIND_BITS == R and before + 1 == action == after - 1:
                    free_recomputes.add(action)
            return [
                Action(KINDS[action & KIND_BITS], action // self.stride, action % self.stride // 4)
                for action in order
                if action not in free_recomputes
            ]

        return Schedule.make(self.placement, map(decode, orders), name)

    def orders(self, schedule: Schedule) -> IntegerOrders | None:
        """The inverse of `schedule`, for a complete one; None when it recomputes other stages than this problem."""
        if any(not self.recomputed[stage] for stage, _ in schedule.recomputed):
            return None
        recomputed_stages = [
            stage for stage, recomputed in enumerate(self.recomputed) if recomputed
        ]
        full_schedule = split_backward(add_recompute(schedule, recomputed_stages))
        orders: IntegerOrders = []
        for rank_order in full_schedule.orders:
            integers: list[int] = []
            for kind, stage, microbatch in rank_order:
                if kind not in KINDS or microbatch is None:
                    continue
                action = self.action(KINDS.index(kind), stage, microbatch)
                follows_forward = integers[-1:] == [action - I]
                if kind == "I" and self.recomputed[stage] and follows_forward:
                    # the R that costs nothing
                    integers.append(action - 1)
                integers.append(action)
            orders.append(integers)
        return orders

    def one_by_one(self) -> IntegerOrders:
        """Each microbatch through all stages and back before the next: of all schedules the least memory."""
        orders: IntegerOrders = [[] for _ in range(self.ranks)]
        for microbatch in range(self.microbatches):
            for stage in range(self.stages):
                orders[self.placement[stage]].append(self.action(F, stage, microbatch))
            for stage in reversed(range(self.stages)):
                order = orders[self.placement[stage]]
                if self.recomputed[stage]:
                    order.append(self.action(R, stage, microbatch))
                order += [self.action(I, stage, microbatch), self.action(W, stage, microbatch)]
        return orders
