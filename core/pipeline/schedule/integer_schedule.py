"""A schedule as lists of integers: what the search scores thousands of times. Standard library only.

Action `kind` of stage s on microbatch m is the integer 4 (s M + m) + "FRIW".index(kind), so that what an action
needs on its own stage is its number minus one. Orders are in full form: every microbatch of a recomputed stage
has its R, also one whose F, R and I stand together. There R costs nothing and F keeps its graph; `schedule`
leaves it out.
"""

from collections.abc import Collection, Sequence

from core.pipeline.schedule.actions import Action, Schedule
from core.pipeline.schedule.passes import add_recompute, split_backward
from core.pipeline.schedule.player import Costs

F, R, I, W = range(4)  # noqa: E741  (the kinds' own letters)
KINDS = "FRIW"
Orders = list[list[int]]


class Flat:
    """Placement, microbatches and costs in flat lists, and the fast twin of `play`.

    work[rank]: time of all its actions; pace: of the busiest rank for one microbatch. Of action a: duration[a];
    source[a], the action of another stage whose result it needs (-1: none); delay[a], how long that travels;
    takes[a], the memory it adds, F and R when they start, I and W when they end.
    """

    def __init__(
        self, placement: Sequence[int], microbatches: int, costs: Costs, recompute: Collection[int] = ()
    ) -> None:
        self.placement, self.microbatches = tuple(placement), microbatches
        self.stages, self.ranks = len(self.placement), max(self.placement) + 1
        self.recomputed = [s in recompute for s in range(self.stages)]
        self.stages_of = [[s for s, owner in enumerate(self.placement) if owner == r] for r in range(self.ranks)]
        self.step = 4 * microbatches  # from an action to the same of the next stage
        self.size = self.step * self.stages
        self.actions = microbatches * sum(4 if again else 3 for again in self.recomputed)
        self.duration, self.takes, self.graph = [0.0] * self.size, [0.0] * self.size, [0.0] * self.stages
        self.source, self.delay = [-1] * self.size, [0.0] * self.size
        for s in range(self.stages):
            self._fill_stage(s, costs)
        self.work = [microbatches * sum(map(self.stage_work, mine)) for mine in self.stages_of]
        self.pace = max(self.work) / max(1, microbatches)

    def _fill_stage(self, s: int, costs: Costs) -> None:
        saved, graph, waiting = (costs.at(name, s) for name in ("saved", "graph", "waiting"))
        self.graph[s] = graph
        takes = (saved if self.recomputed[s] else graph, graph - saved, waiting - graph, -waiting)
        times = [costs.at(name, s) for name in KINDS]
        for first in range(s * self.step, (s + 1) * self.step, 4):
            self.duration[first : first + 4] = times
            self.takes[first : first + 4] = takes
            if s:
                self.source[first + F] = first + F - self.step
            self.source[first + I] = first + I + self.step if s < self.stages - 1 else first + F
            for kind in (F, I):
                source = self.source[first + kind]
                away = source >= 0 and self.placement[source // self.step] != self.placement[s]
                self.delay[first + kind] = costs.comm if away else 0.0

    def stage_work(self, s: int) -> float:
        """Time of everything that a stage does for a microbatch, R included."""
        return sum(self.duration[s * self.step + k] for k in range(4) if k != R or self.recomputed[s])

    def bound(self) -> float:
        """No schedule is faster: a rank's first F waits for the stages before, then the rank has all its work.

        R is left out where I follows F directly: the rank rests meanwhile, at least for the next stage's F and I.
        """
        least = 0.0
        for mine, work in zip(self.stages_of, self.work, strict=True):
            for s in mine:
                first, after = s * self.step, (s + 1) * self.step
                rest = self.duration[after + F] + self.duration[after + I] if s < self.stages - 1 else 0.0
                if self.recomputed[s]:
                    work -= self.microbatches * max(0.0, self.duration[first + R] - rest)
            before = range(mine[0])
            head = sum(self.duration[s * self.step] + self.delay[(s + 1) * self.step] for s in before)
            least = max(least, head + work)
        return least

    def action(self, kind: int, stage: int, microbatch: int) -> int:
        """The number of an action."""
        return stage * self.step + 4 * microbatch + kind

    def row(self, order: list[int]) -> tuple[list[float], float]:
        """(time of each action, peak memory) of one rank's order."""
        takes, durations = self.takes, list(map(self.duration.__getitem__, order))
        held = peak = 0.0
        last, free = len(order) - 2, -1  # free: the R that costs nothing
        for k, a in enumerate(order):
            if a & 3 == F and k < last and order[k + 2] == a + I and order[k + 1] == a + R:
                held += self.graph[a // self.step]
                free, durations[k + 1] = a + R, 0.0
            elif a != free:
                held += takes[a]
            if held > peak:
                peak = held
        return durations, peak

    def ends(self, orders: Orders, durations: list[list[float]]) -> tuple[float, list[float]] | None:
        """(makespan, end of each action): each rank does its list in order; None when ranks wait for ever."""
        source, delay = self.source, self.delay
        end = [-1.0] * self.size  # not done; below -1: not done, and rank -2 - end waits for it
        position, clock = [0] * self.ranks, [0.0] * self.ranks
        ready = list(range(self.ranks))
        while ready:
            rank = ready.pop()
            order, times, now = orders[rank], durations[rank], clock[rank]
            for k in range(position[rank], len(order)):
                a = order[k]
                if (needs := source[a]) >= 0:
                    arrival = end[needs]
                    if arrival < 0:
                        end[needs], position[rank] = -2.0 - rank, k
                        break
                    arrival += delay[a]
                    if arrival > now:
                        now = arrival
                now += times[k]
                waiter = end[a]
                end[a] = now
                if waiter < -1:
                    ready.append(int(-2 - waiter))
            else:
                position[rank] = len(order)
            clock[rank] = now
        if any(k < len(order) for k, order in zip(position, orders, strict=True)):
            return None
        return max(clock), end

    def score(self, orders: Orders) -> tuple[float, list[float]] | None:
        """(makespan, peak of each rank), equal to `play`'s; None when ranks wait for ever."""
        rows = [self.row(order) for order in orders]
        found = self.ends(orders, [times for times, _ in rows])
        return None if found is None else (found[0], [peak for _, peak in rows])

    def schedule(self, orders: Orders, name: str = "auto") -> Schedule:
        """Integers to actions, without the R that cost nothing."""

        def decode(order: list[int]) -> list[Action]:
            free = {
                b for a, b, c in zip(order, order[1:], order[2:], strict=False) if a + 1 == b == c - 1 and b & 3 == R
            }
            return [Action(KINDS[a & 3], a // self.step, a % self.step // 4) for a in order if a not in free]

        return Schedule.make(self.placement, map(decode, orders), name)

    def orders(self, schedule: Schedule) -> Orders | None:
        """The inverse of `schedule`, for a complete one; None when it recomputes other stages than this problem."""
        if any(not self.recomputed[s] for s, _ in schedule.recomputed):
            return None
        found: Orders = []
        for order in split_backward(
            add_recompute(schedule, [s for s, yes in enumerate(self.recomputed) if yes])
        ).orders:
            row: list[int] = []
            for kind, s, m in order:
                if kind not in KINDS or m is None:
                    continue
                a = self.action(KINDS.index(kind), s, m)
                if kind == "I" and self.recomputed[s] and row[-1:] == [a - I]:
                    row.append(a - 1)
                row.append(a)
            found.append(row)
        return found

    def one_by_one(self) -> Orders:
        """Each microbatch through all stages and back before the next: of all schedules the least memory."""
        orders: Orders = [[] for _ in range(self.ranks)]
        for m in range(self.microbatches):
            for s in range(self.stages):
                orders[self.placement[s]].append(self.action(F, s, m))
            for s in reversed(range(self.stages)):
                kinds = (R, I, W) if self.recomputed[s] else (I, W)
                orders[self.placement[s]].extend(self.action(kind, s, m) for kind in kinds)
        return orders
