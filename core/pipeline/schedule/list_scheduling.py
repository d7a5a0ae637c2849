"""Event-driven list scheduling: whoever is free takes the best action that can start. Standard library only."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.pipeline.schedule.integer_schedule import KINDS, F, Flat, I, Orders, R, W

FOREVER = 1 << 60


@dataclass(frozen=True)
class Policy:
    """What a free rank prefers.

    kinds: which goes first among the actions that can start now. in_flight: at most so many microbatches of a
    stage between F and I. ahead: R may run for so many microbatches whose gradient has not come. patience:
    something that an action of a preferred kind would have to wait for is not started, when that arrives within
    this part of its time. deep: among equals the deepest stage goes first, else the oldest microbatch. waiting:
    W goes first as soon as so many wait. direct: I of the last stage follows F at once, so that no R is needed.
    pace: microbatches enter the pipeline no closer than this part of the work of one. careful: take
    memory only if the microbatches can still end one after the other; else whatever fits, which may get stuck.
    """

    kinds: str = "IFRW"
    in_flight: int = FOREVER
    ahead: int = 1
    patience: float = 0.0
    deep: bool = True
    waiting: int = FOREVER
    direct: bool = True
    pace: float = 0.0
    careful: bool = True


PLAIN = (
    Policy(),
    Policy(kinds="IRFW", ahead=2),
    Policy(ahead=0),
    Policy(kinds="FIWR", patience=0.5, deep=False, pace=0.5),
    Policy(kinds="IFWR", pace=1.0),
)


class Policies:
    """Endless policies, the plain ones first: `draw` any, `vary` one field of a good one."""

    def __init__(self, flat: Flat, rng: random.Random) -> None:
        ranks, chunks, again = flat.ranks, max(map(len, flat.stages_of)), any(flat.recomputed)
        often = ("IFRW", "IFWR", "IRFW", "FIRW", "FIWR", "FRIW")
        caps = (ranks // 2, ranks * 3 // 4, ranks, ranks, ranks * 3 // 2, 2 * ranks, FOREVER, FOREVER)
        self.rng, self.plain = rng, list(PLAIN)
        # what stands twice is drawn twice as often: over many problems it led to the best tenth more often
        self.choices: dict[str, tuple[Any, ...]] = {
            "kinds": (*often, *often, *(k for k in map("".join, itertools.permutations(KINDS)) if k[0] != "R")),
            "in_flight": tuple(max(1, cap) for cap in caps),
            "ahead": (0, 1, 1, 2) if again else (0,),
            "patience": (0.0, 0.0, 0.5, 0.5, 1.0),
            "deep": (True, False),
            "waiting": (FOREVER, FOREVER, FOREVER, chunks * ranks, chunks, 1),
            "direct": (True, False) if flat.recomputed[-1] else (True,),
            "pace": (0.0, 0.0, 0.5, 0.5, 0.75, 0.9, 1.0),
            "careful": (True, True, False),
        }

    def draw(self) -> Policy:
        """A plain one as long as there is one, then any."""
        if self.plain:
            return self.plain.pop(0)
        return Policy(**{name: self.rng.choice(values) for name, values in self.choices.items()})

    def vary(self, policy: Policy) -> Policy:
        """Another value for one field."""
        name = self.rng.choice([name for name, values in self.choices.items() if len(values) > 1])
        others = [value for value in self.choices[name] if value != getattr(policy, name)]
        return replace(policy, **{name: self.rng.choice(others)})


class _Memory:
    """What each rank holds, and whether it may take more.

    A rank may when afterwards its microbatches, oldest first, can still end one after the other (the banker's
    rule): so no choice ends with every rank waiting for memory, if one microbatch at a time fits.
    """

    def __init__(self, flat: Flat, limits: Sequence[float], careful: bool) -> None:
        self.flat, self.limits, self.careful = flat, limits, careful
        self.held = [0.0] * flat.ranks
        # done[rank][m]: how far each stage of the rank is with m, 3 bits a stage: 0 nothing, 1 F, 2 R, 3 I, 4 W
        self.done = [[0] * flat.microbatches for _ in range(flat.ranks)]
        self.oldest, self.newest = [0] * flat.ranks, [0] * flat.ranks
        self.slot = [flat.stages_of[rank].index(s) * 3 for s, rank in enumerate(flat.placement)]
        self.known: list[dict[int, tuple[float, float]]] = [{} for _ in range(flat.ranks)]
        self.whole = [self.to_end(rank, 0)[0] for rank in range(flat.ranks)]
        self.finished = [sum(4 << self.slot[s] for s in mine) for mine in flat.stages_of]

    def to_end(self, rank: int, done: int) -> tuple[float, float]:
        """(memory it takes on top to end a microbatch that is so far, memory it holds now)."""
        if done in self.known[rank]:
            return self.known[rank][done]
        flat, more, peak, held = self.flat, 0.0, 0.0, 0.0
        mine = flat.stages_of[rank]
        plan = [(s, F) for s in mine] + [(s, kind) for s in reversed(mine) for kind in (R, I, W)]
        for s, kind in plan:
            if kind == R and not flat.recomputed[s]:
                continue
            takes = flat.takes[s * flat.step + kind]
            if done >> self.slot[s] & 7 > kind:
                held += takes
            else:
                more += takes
                peak = max(peak, more)
        self.known[rank][done] = (peak, held)
        return peak, held

    def fits(self, rank: int, stage: int, microbatch: int, kind: int) -> bool:
        """Whether the rank may do an action (an F with the R of a direct I counts as its R)."""
        more = self.change(rank, stage, microbatch, kind)
        limit = self.limits[rank]
        held = self.held[rank] + more
        if more <= 0 or held + self.whole[rank] <= limit or not self.careful:
            return more <= 0 or held <= limit
        row, first = self.done[rank], self.oldest[rank]
        before, row[microbatch] = row[microbatch], self.after(microbatch, rank, stage, kind)
        safe = held <= limit
        for m in range(first, max(self.newest[rank], microbatch + 1)):
            if not safe:
                break
            peak, has = self.to_end(rank, row[m])
            safe = held + peak <= limit
            held -= has
        row[microbatch] = before
        return safe

    def after(self, microbatch: int, rank: int, stage: int, kind: int) -> int:
        """How far the microbatch is once the action is done."""
        slot, done = self.slot[stage], self.done[rank][microbatch]
        return done & ~(7 << slot) | (kind + 1) << slot

    def change(self, rank: int, stage: int, microbatch: int, kind: int) -> float:
        """Memory that everything of the stage up to `kind` takes on top."""
        has = self.done[rank][microbatch] >> self.slot[stage] & 7
        kinds = (k for k in range(has, kind + 1) if k != R or self.flat.recomputed[stage])
        first = stage * self.flat.step
        return sum(self.flat.takes[first + k] for k in kinds)

    def do(self, rank: int, stage: int, microbatch: int, kind: int) -> None:
        """Schedule an action: its time, its rank's clock and memory."""
        self.held[rank] += self.change(rank, stage, microbatch, kind)
        self.done[rank][microbatch] = self.after(microbatch, rank, stage, kind)
        self.newest[rank] = max(self.newest[rank], microbatch + 1)
        row, whole = self.done[rank], self.finished[rank]
        while self.oldest[rank] < self.newest[rank] and row[self.oldest[rank]] == whole:
            self.oldest[rank] += 1


class Run:
    """One pass: the state of every rank, in the order of time."""

    def __init__(self, flat: Flat, limits: Sequence[float], policy: Policy) -> None:
        self.flat, self.policy = flat, policy
        self.memory = _Memory(flat, limits, policy.careful)
        self.place = [policy.kinds.index(kind) for kind in KINDS]
        self.count = [[0] * flat.stages for _ in KINDS]
        self.pending: list[deque[tuple[int, int]]] = [deque() for _ in range(flat.ranks)]
        self.end = [-1.0] * flat.size
        self.orders: Orders = [[] for _ in range(flat.ranks)]
        self.free = [0.0] * flat.ranks
        self.pace = policy.pace * flat.pace
        self.events = [(0.0, rank) for rank in range(flat.ranks)]

    def arrival(self, a: int) -> float:
        """When the input of an action is there (-1: not yet known)."""
        source = self.flat.source[a]
        if source < 0:
            return self.pace * (a // 4)
        end = self.end[source]
        return end if end < 0 else end + self.flat.delay[a]

    def options(self, rank: int) -> Iterator[tuple[int, int, int, float, int]]:
        """(place, stage, microbatch, arrival, kind) of every action that order and memory allow."""
        flat, policy, fits = self.flat, self.policy, self.memory.fits
        done_f, done_r, done_i, _ = self.count
        place = self.place
        for s in flat.stages_of[rank]:
            m = done_i[s]
            gradient = self.arrival(flat.action(I, s, m)) if m < done_f[s] else -1.0
            again = flat.recomputed[s]
            if gradient >= 0 and (not again or done_r[s] > m) and fits(rank, s, m, I):
                yield place[I], s, m, gradient, I
            if again:
                n = done_r[s]
                needed = n == m and gradient >= 0
                if n < done_f[s] and (needed or n < m + policy.ahead) and fits(rank, s, n, R):
                    yield place[I] if needed else place[R], s, n, gradient if needed and not policy.ahead else 0.0, R
            n = done_f[s]
            if n < flat.microbatches and n - m < policy.in_flight:
                arrives = self.arrival(flat.action(F, s, n))
                at_once = policy.direct and s == flat.stages - 1 and n == m
                if arrives >= 0 and fits(rank, s, n, R if at_once and again else F):
                    yield place[F], s, n, arrives, F
        if self.pending[rank]:
            s, m = self.pending[rank][0]
            yield place[W] if len(self.pending[rank]) < policy.waiting else -1, s, m, 0.0, W

    def choose(self, rank: int, now: float) -> tuple[float, tuple[int, int, int] | None]:
        """(when to look again, or the (stage, microbatch, kind) to start now)."""
        best, key, later = None, (FOREVER, 0, 0), []
        for place, s, m, arrival, kind in self.options(rank):
            if arrival > now:
                later.append((arrival, place))
                continue
            mine = (place, -s, m) if self.policy.deep else (place, m, -s)
            if mine < key:
                best, key = (s, m, kind), mine
        if best is None:
            return min(later, default=(-1.0, 0))[0], None
        if later and self.policy.patience:
            s, _, kind = best
            until = now + self.policy.patience * self.flat.duration[s * self.flat.step + kind]
            better = [arrival for arrival, place in later if place < key[0] and arrival < until]
            if better:
                return min(better), None
        return now, best

    def start(self, rank: int, now: float, stage: int, microbatch: int, kind: int) -> float:
        """Do it, and I with F where that is wanted; returns the end."""
        flat, fits = self.flat, self.memory.fits
        end = self.book(rank, flat.action(kind, stage, microbatch), now)
        last = kind == F and stage == flat.stages - 1 and self.count[I][stage] == microbatch
        if not (last and self.policy.direct and all(fits(rank, stage, microbatch, k) for k in (R, I))):
            return end
        if flat.recomputed[stage]:
            self.book(rank, flat.action(R, stage, microbatch), end, free=True)
        return self.book(rank, flat.action(I, stage, microbatch), end)

    def book(self, rank: int, a: int, now: float, free: bool = False) -> float:
        """Write one action down and tell the rank that waits for it."""
        flat, kind, stage, microbatch = self.flat, a & 3, a // self.flat.step, a % self.flat.step // 4
        end = self.end[a] = now if free else now + flat.duration[a]
        self.orders[rank].append(a)
        self.memory.do(rank, stage, microbatch, kind)
        self.count[kind][stage] += 1
        if kind == W:
            self.pending[rank].popleft()
        if kind == I:
            self.pending[rank].append((stage, microbatch))
        neighbour = stage + 1 if kind == F else stage - 1
        if kind in (F, I) and 0 <= neighbour < flat.stages and flat.placement[neighbour] != rank:
            consumer = a + flat.step if kind == F else a - flat.step
            heapq.heappush(self.events, (end + flat.delay[consumer], flat.placement[neighbour]))
        return end

    def go(self) -> Orders | None:
        """Until nobody has anything to do."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now < self.free[rank]:
                continue
            look, best = self.choose(rank, now)
            if best is not None:
                self.free[rank] = look = self.start(rank, now, *best)
            if look >= 0:
                heapq.heappush(self.events, (look, rank))
        return self.orders if sum(map(len, self.orders)) == self.flat.actions else None


def list_schedule(flat: Flat, limits: Sequence[float], policy: Policy) -> Orders | None:
    """One pass under memory limits (per rank) and a policy; None when it gets stuck.

    With limits that let one microbatch at a time through, a careful one never does.
    """
    return Run(flat, limits, policy).go()
