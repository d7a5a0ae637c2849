"""Event-driven list scheduling: whoever is free takes the best action that can start. Standard library only."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.pipeline.schedule.activation_memory import ActivationMemory
from core.pipeline.schedule.integer_schedule import (
    KIND_BITS,
    KINDS,
    F,
    I,
    IntegerOrders,
    R,
    SchedulingProblem,
    W,
)

FOREVER = 1 << 60


@dataclass(frozen=True)
class Policy:
    """What a free rank prefers.

    kinds: which goes first among the actions that can start now. in_flight: at most so many microbatches of a
    stage between F and I. ahead: R may run for so many microbatches whose gradient has not come. patience:
    an action is not started if one of a preferred kind arrives within this part of its time. deep: among equals the
    deepest stage goes first, else the oldest microbatch. waiting: W goes first as soon as so many wait. direct: I of
    the last stage follows F at once, so that no R is needed. pace: microbatches enter the pipeline no closer than
    this part of the work of one. careful: take memory only if the microbatches can still end one after the other;
    else whatever fits, which may deadlock.
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


PLAIN_POLICIES = (
    Policy(),
    Policy(kinds="IRFW", ahead=2),
    Policy(ahead=0),
    Policy(kinds="FIWR", patience=0.5, deep=False, pace=0.5),
    Policy(kinds="IFWR", pace=1.0),
)


class Policies:
    """Endless policies, the plain ones first: `draw` any, `vary` one field of a good one."""

    def __init__(self, problem: SchedulingProblem, rng: random.Random) -> None:
        ranks = problem.ranks
        chunks = max(map(len, problem.stages_of))
        frequent = ("IFRW", "IFWR", "IRFW", "FIRW", "FIWR", "FRIW")
        permutations = map("".join, itertools.permutations(KINDS))
        not_recompute_first = [kinds for kinds in permutations if kinds[0] != "R"]
        in_flight = (
            ranks // 2,
            ranks * 3 // 4,
            ranks,
            ranks,
            ranks * 3 // 2,
            2 * ranks,
            FOREVER,
            FOREVER,
        )
        self.rng = rng
        self.plain = list(PLAIN_POLICIES)
        # options without an effect in this problem have one value
        ahead = (0, 1, 1, 2) if any(problem.recomputed) else (0,)
        direct = (True, False) if problem.recomputed[-1] else (True,)
        # what stands twice is drawn twice as often: over many problems it led to the best tenth more often
        self.choices: dict[str, tuple[Any, ...]] = {
            "kinds": (*frequent, *frequent, *not_recompute_first),
            "in_flight": tuple(max(1, limit) for limit in in_flight),
            "ahead": ahead,
            "patience": (0.0, 0.0, 0.5, 0.5, 1.0),
            "deep": (True, False),
            "waiting": (FOREVER, FOREVER, FOREVER, chunks * ranks, chunks, 1),
            "direct": direct,
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


class ListScheduler:
    """One pass: the state of every rank, in the order of time."""

    def __init__(self, problem: SchedulingProblem, limits: Sequence[float], policy: Policy) -> None:
        self.problem = problem
        self.policy = policy
        self.memory = ActivationMemory(problem, limits, policy.careful)
        # by kind; the smallest goes first
        self.priority = [policy.kinds.index(kind) for kind in KINDS]
        # microbatches by kind and stage
        self.done_count = [[0] * problem.stages for _ in KINDS]
        # (stage, microbatch) whose W waits, per rank, oldest first
        self.waiting_weights: list[deque[tuple[int, int]]] = [deque() for _ in range(problem.ranks)]
        # of each action; -1: not done
        self.end = [-1.0] * problem.size
        self.orders: IntegerOrders = [[] for _ in range(problem.ranks)]
        self.free_at = [0.0] * problem.ranks
        self.entry_interval = policy.pace * problem.time_per_microbatch
        # a heap: when to look at which rank
        self.events = [(0.0, rank) for rank in range(problem.ranks)]

    def arrival(self, action: int) -> float:
        """When the input of an action is there (-1: not yet known)."""
        source = self.problem.source[action]
        # F of the first stage, where action // 4 is the microbatch
        if source < 0:
            return self.entry_interval * (action // 4)
        end = self.end[source]
        if end < 0:
            return end
        return end + self.problem.delay[action]

    def options(self, rank: int) -> Iterator[tuple[int, int, int, float, int]]:
        """(priority, stage, microbatch, arrival, kind) of every action that order and memory allow.

        Microbatches of a stage keep their order, so that a stage has at most one action of each kind to offer.
        """
        problem = self.problem
        policy = self.policy
        fits = self.memory.fits
        done_forward, done_recompute, done_input, _ = self.done_count
        priority = self.priority
        for stage in problem.stages_of[rank]:
            # the microbatch whose I comes next
            oldest = done_input[stage]
            gradient = -1.0
            if oldest < done_forward[stage]:
                gradient = self.arrival(problem.action(I, stage, oldest))

            # I: its gradient is on the way, and its graph is there
            recomputed = problem.recomputed[stage]
            has_graph = not recomputed or done_recompute[stage] > oldest
            if gradient >= 0 and has_graph and fits(rank, stage, oldest, I):
                yield priority[I], stage, oldest, gradient, I

            # R: for a gradient that is on the way, or `ahead` microbatches before it comes
            if recomputed:
                microbatch = done_recompute[stage]
                needed = microbatch == oldest and gradient >= 0
                allowed = needed or microbatch < oldest + policy.ahead
                if (
                    microbatch < done_forward[stage]
                    and allowed
                    and fits(rank, stage, microbatch, R)
                ):
                    # needed for an I, it is as urgent as the I itself; with `ahead` it need not wait for the gradient
                    if needed:
                        recompute_priority = priority[I]
                    else:
                        recompute_priority = priority[R]
                    arrival = gradient if needed and not policy.ahead else 0.0
                    yield recompute_priority, stage, microbatch, arrival, R

            # F: its input is on the way, and not too many are in flight
            microbatch = done_forward[stage]
            if microbatch < problem.microbatches and microbatch - oldest < policy.in_flight:
                arrival = self.arrival(problem.action(F, stage, microbatch))
                followed_by_input = (
                    policy.direct and stage == problem.stages - 1 and microbatch == oldest
                )
                up_to = R if followed_by_input and recomputed else F
                if arrival >= 0 and fits(rank, stage, microbatch, up_to):
                    yield priority[F], stage, microbatch, arrival, F

        # W: the oldest one that waits; before everything else when too many wait
        waiting = self.waiting_weights[rank]
        if waiting:
            stage, microbatch = waiting[0]
            is_urgent = len(waiting) >= policy.waiting
            yield -1 if is_urgent else priority[W], stage, microbatch, 0.0, W

    def choose(self, rank: int, now: float) -> tuple[float, tuple[int, int, int] | None]:
        """(when to look again, or the (stage, microbatch, kind) to start now)."""
        best = None
        best_key = (FOREVER, 0, 0)
        later = []
        for priority, stage, microbatch, arrival, kind in self.options(rank):
            if arrival > now:
                later.append((arrival, priority))
                continue
            # the deepest stage has the least work before it; the oldest microbatch frees its memory first
            if self.policy.deep:
                key = (priority, -stage, microbatch)
            else:
                key = (priority, microbatch, -stage)
            if key < best_key:
                best = (stage, microbatch, kind)
                best_key = key
        if best is None:
            return min(later, default=(-1.0, 0))[0], None
        # patience: it may pay to wait for something better that is about to arrive
        if later and self.policy.patience:
            stage, _, kind = best
            until = (
                now
                + self.policy.patience * self.problem.duration[stage * self.problem.stride + kind]
            )
            worth_waiting = [
                arrival for arrival, priority in later if priority < best_key[0] and arrival < until
            ]
            if worth_waiting:
                return min(worth_waiting), None
        return now, best

    def start(self, rank: int, now: float, stage: int, microbatch: int, kind: int) -> float:
        """Do an action, and I with F where the policy says so; returns the end."""
        problem = self.problem
        fits = self.memory.fits
        end = self.book(rank, problem.action(kind, stage, microbatch), now)
        is_last_forward = kind == F and stage == problem.stages - 1
        if not is_last_forward or self.done_count[I][stage] != microbatch or not self.policy.direct:
            return end
        if not all(fits(rank, stage, microbatch, following) for following in (R, I)):
            return end
        if problem.recomputed[stage]:
            self.book(rank, problem.action(R, stage, microbatch), end, free=True)
        return self.book(rank, problem.action(I, stage, microbatch), end)

    def book(self, rank: int, action: int, now: float, free: bool = False) -> float:
        """Write one action down and tell the rank that waits for its result; returns its end."""
        problem = self.problem
        kind = action & KIND_BITS
        stage = action // problem.stride
        microbatch = action % problem.stride // 4
        end = now
        if not free:
            end += problem.duration[action]
        self.end[action] = end
        self.orders[rank].append(action)
        self.memory.do(rank, stage, microbatch, kind)
        self.done_count[kind][stage] += 1
        if kind == W:
            self.waiting_weights[rank].popleft()
        if kind == I:
            self.waiting_weights[rank].append((stage, microbatch))

        # wake the rank of the neighbouring stage when the message is there
        if kind not in (F, I):
            return end
        # F goes to the next stage, I to the previous one
        direction = 1 if kind == F else -1
        neighbour = stage + direction
        if 0 <= neighbour < problem.stages and problem.placement[neighbour] != rank:
            consumer = action + direction * problem.stride
            heapq.heappush(
                self.events, (end + problem.delay[consumer], problem.placement[neighbour])
            )
        return end

    def run(self) -> IntegerOrders | None:
        """Until nobody has anything to do; None when actions remain."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            # busy: it looks again when its action ends
            if now < self.free_at[rank]:
                continue
            next_look, best = self.choose(rank, now)
            if best is not None:
                self.free_at[rank] = next_look = self.start(rank, now, *best)
            if next_look >= 0:
                heapq.heappush(self.events, (next_look, rank))
        # a deadlock over memory
        if sum(map(len, self.orders)) < self.problem.actions:
            return None
        return self.orders


def list_schedule(
    problem: SchedulingProblem, limits: Sequence[float], policy: Policy
) -> IntegerOrders | None:
    """One pass under memory limits (per rank) and a policy; None when it deadlocks.

    With limits that let one microbatch at a time through, a careful one never does.
    """
    return ListScheduler(problem, limits, policy).run()
