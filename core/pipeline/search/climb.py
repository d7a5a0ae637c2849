"""Simulated annealing on a schedule: only moves that touch the longest chain can shorten the step.

Standard library only; the same seed gives the same schedule on every machine.
"""

import math
import random
from collections.abc import Sequence
from time import perf_counter

from core.pipeline.schedule.integer_schedule import F, Flat, I, Orders

HOT, COLD = 0.3, 0.02  # how much longer a step may get, first and last, in the mean time of an action
REACH = 4  # so far from the chain, in actions, a move may begin or end
Segment = tuple[int, int, int]  # rank, first, last: a run of the longest chain on one rank


class Climber:
    """Orders that it changes in place, and the best ones it saw. spent: actions looked at, the measure of work."""

    def __init__(self, flat: Flat, orders: Orders, limits: Sequence[float], rng: random.Random) -> None:
        self.flat, self.limits, self.rng = flat, limits, rng
        self.spent, self.best_orders = 0, orders
        self.restart()
        self.best = self.makespan
        self.unit = sum(map(sum, self.rows)) / max(1, flat.actions)  # the mean time of an action

    def restart(self) -> None:
        """Back to the best orders."""
        self.orders = [list(order) for order in self.best_orders]
        self.rows = [self.flat.row(order)[0] for order in self.orders]
        found = self.flat.ends(self.orders, self.rows)
        assert found is not None
        self.makespan, self.end = found

    def chain(self) -> list[Segment]:
        """The longest chain, last rank first: each action in it starts when the one before it ends."""
        flat, end = self.flat, self.end
        where = {a: k for order in self.orders for k, a in enumerate(order)}
        rank = max(range(flat.ranks), key=lambda r: end[self.orders[r][-1]])
        last = k = len(self.orders[rank]) - 1
        segments = []
        while True:
            a = self.orders[rank][k]
            source = flat.source[a]
            arrival = end[source] + flat.delay[a] if source >= 0 else 0.0
            if k and end[self.orders[rank][k - 1]] >= arrival:
                k -= 1
                continue
            segments.append((rank, k, last))
            if source < 0:
                return segments
            rank = flat.placement[source // flat.step]
            last = k = where[source]

    def propose(self, segment: Segment) -> tuple[int, int, int] | None:
        """(rank, from, to): an action of the segment, or one close to it, somewhere else in or around it."""
        rank, first, last = segment
        order, draw = self.orders[rank], self.rng.random
        low, high = max(0, first - REACH), min(len(order) - 1, last + REACH)
        at = low + int(draw() * (high - low + 1))
        a = order[at]
        start = stop = at
        while start > low and not self.needs(order[start - 1], a):
            start -= 1
        while stop < high and not self.needs(a, order[stop + 1]):
            stop += 1
        if start == stop:
            return None
        to = start + int(draw() * (stop - start))
        return rank, at, to if to < at else to + 1

    def needs(self, first: int, then: int) -> bool:
        """Whether `then` must stay behind `first` on its rank: both of one microbatch, F F .. I I .., or both F of
        one stage, whose microbatches keep their order (batch norms, random numbers, whoever counts in a loss)."""
        step = self.flat.step
        if (first % step ^ then % step) > 3:
            return first & 3 == then & 3 == F and first // step == then // step
        if then & 3 == F or (first & 3 == I and then & 3 == I):
            return True
        return (first & 3 == F and then & 3 == I) or first // step == then // step

    def attempt(self, rank: int, at: int, to: int, allowed: float) -> bool:
        """Move an action if memory and the makespan allow it."""
        old, old_row = self.orders[rank], self.rows[rank]
        new = old.copy()
        new.insert(to, new.pop(at))
        self.spent += len(new)
        row, peak = self.flat.row(new)
        if peak > self.limits[rank]:
            return False
        self.orders[rank], self.rows[rank] = new, row
        self.spent += self.flat.actions
        found = self.flat.ends(self.orders, self.rows)
        if found is None or found[0] > allowed:
            self.orders[rank], self.rows[rank] = old, old_row
            return False
        self.makespan, self.end = found
        return True

    def anneal(self, budget: int, bound: float, end: float) -> None:
        """Until `budget` actions are looked at, the makespan is `bound`, or it is `end` (of the process's clock)."""
        draw = self.rng.random
        begin, stop = self.spent, self.spent + budget
        self.restart()
        segments = self.chain()
        while self.spent + 3 * self.flat.actions < stop and self.best > bound:
            self.spent += 4
            move = self.propose(segments[int(draw() * len(segments))])
            if move is None:
                continue
            if perf_counter() > end:
                return
            heat = self.unit * HOT * (COLD / HOT) ** ((self.spent - begin) / budget)
            if not self.attempt(*move, self.makespan - heat * math.log(1.0 - draw())):
                continue
            segments = self.chain()
            if self.makespan < self.best:
                self.best, self.best_orders = self.makespan, [list(order) for order in self.orders]
