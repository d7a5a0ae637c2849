"""Simulated annealing on a schedule: only moves that touch the critical path can shorten the step.

Standard library only; the same seed gives the same schedule on every machine.
"""

import math
import random
from collections.abc import Sequence
from time import perf_counter

from core.pipeline.schedule.integer_schedule import (
    KIND_BITS,
    F,
    I,
    IntegerOrders,
    SchedulingProblem,
)

# The temperature: how much longer a step may get, first and last, in units of the mean time of an action
FIRST_TEMPERATURE = 0.3
LAST_TEMPERATURE = 0.02
# a move may begin or end so many actions away from the critical path
REACH = 4
# rank, first, last: a run of the critical path on one rank
Segment = tuple[int, int, int]


class Climber:
    """Orders that it changes in place, and the best ones it saw. spent: actions looked at, the measure of work."""

    def __init__(
        self,
        problem: SchedulingProblem,
        orders: IntegerOrders,
        limits: Sequence[float],
        rng: random.Random,
    ) -> None:
        self.problem = problem
        self.limits = limits
        self.rng = rng
        self.spent = 0
        self.best_orders = orders
        self.restart()
        self.best = self.makespan
        self.mean_duration = sum(map(sum, self.durations)) / max(1, problem.actions)

    def restart(self) -> None:
        """Back to the best orders."""
        self.orders = [list(order) for order in self.best_orders]
        self.durations = [self.problem.rank_costs(order)[0] for order in self.orders]
        ends = self.problem.end_times(self.orders, self.durations)
        assert ends is not None
        self.makespan, self.end = ends

    def critical_path(self) -> list[Segment]:
        """The longest chain, last rank first: each action in it starts when the one before it ends."""
        problem = self.problem
        end = self.end
        position: dict[int, int] = {}
        for order in self.orders:
            position.update(zip(order, range(len(order)), strict=True))
        rank = max(range(problem.ranks), key=lambda r: end[self.orders[r][-1]])
        last = index = len(self.orders[rank]) - 1
        segments = []
        while True:
            action = self.orders[rank][index]
            source = problem.source[action]
            arrival = 0.0
            if source >= 0:
                arrival = end[source] + problem.delay[action]
            # it started when its rank became free: the path goes on along the rank
            if index and end[self.orders[rank][index - 1]] >= arrival:
                index -= 1
                continue
            # it waited for its input: the path goes on where that was made
            segments.append((rank, index, last))
            if source < 0:
                return segments
            rank = problem.placement[source // problem.stride]
            last = index = position[source]

    def propose(self, segment: Segment) -> tuple[int, int, int] | None:
        """(rank, from, to): an action of the segment, or one close to it, somewhere else in or around it."""
        rank, first, last = segment
        order = self.orders[rank]
        draw = self.rng.random
        low = max(0, first - REACH)
        high = min(len(order) - 1, last + REACH)
        index = low + int(draw() * (high - low + 1))
        action = order[index]
        start = stop = index
        while start > low and not self.must_follow(order[start - 1], action):
            start -= 1
        while stop < high and not self.must_follow(action, order[stop + 1]):
            stop += 1
        if start == stop:
            return None
        target = start + int(draw() * (stop - start))
        if target >= index:  # one of the other positions
            target += 1
        return rank, index, target

    def must_follow(self, first: int, second: int) -> bool:
        """Whether `second` must stay behind `first` on its rank: both of one microbatch, F F .. I I .., or both F of
        one stage, whose microbatches keep their order (batch norms, random numbers, whoever counts in a loss)."""
        stride = self.problem.stride
        # action % stride is 4 * microbatch + kind: if two differ in the lowest two bits only, their exclusive or is
        # at most 3, and the microbatch is the same
        same_microbatch = (first % stride ^ second % stride) <= KIND_BITS
        same_stage = first // stride == second // stride
        first_kind = first & KIND_BITS
        second_kind = second & KIND_BITS
        if not same_microbatch:
            return first_kind == second_kind == F and same_stage
        if second_kind == F or (first_kind == I and second_kind == I):
            return True
        return (first_kind == F and second_kind == I) or same_stage

    def attempt(self, rank: int, index: int, target: int, allowed: float) -> bool:
        """Move an action if the memory limit and `allowed`, the longest makespan, permit it."""
        old_order = self.orders[rank]
        old_durations = self.durations[rank]
        new_order = old_order.copy()
        new_order.insert(target, new_order.pop(index))
        self.spent += len(new_order)
        durations, peak = self.problem.rank_costs(new_order)
        if peak > self.limits[rank]:
            return False
        self.orders[rank], self.durations[rank] = new_order, durations
        self.spent += self.problem.actions
        ends = self.problem.end_times(self.orders, self.durations)
        # a deadlock, or too slow
        if ends is None or ends[0] > allowed:
            self.orders[rank], self.durations[rank] = old_order, old_durations
            return False
        self.makespan, self.end = ends
        return True

    def anneal(self, budget: int, bound: float, deadline: float) -> None:
        """Until `budget` actions are looked at, the makespan is `bound`, or the process's clock shows `deadline`."""
        draw = self.rng.random
        begin = self.spent
        stop = self.spent + budget
        self.restart()
        segments = self.critical_path()
        while self.spent + 3 * self.problem.actions < stop and self.best > bound:
            self.spent += 4
            move = self.propose(segments[int(draw() * len(segments))])
            if move is None:
                continue
            if perf_counter() > deadline:
                return
            # Metropolis: accept a longer step with probability exp(-extra / temperature), which falls geometrically.
            # -log(1 - draw) is exponentially distributed: comparing with it is the same, without exp of a large
            # number
            progress = (self.spent - begin) / budget
            cooling = (LAST_TEMPERATURE / FIRST_TEMPERATURE) ** progress
            temperature = self.mean_duration * FIRST_TEMPERATURE * cooling
            if not self.attempt(*move, self.makespan - temperature * math.log(1.0 - draw())):
                continue
            segments = self.critical_path()
            if self.makespan < self.best:
                self.best = self.makespan
                self.best_orders = [list(order) for order in self.orders]
