"""The automatic schedule: named ones, list scheduling, then annealing, under a memory limit.

Standard library only; the same arguments give the same schedule, unless a limit of seconds ends the search.
"""

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from time import perf_counter

from core.pipeline.schedule.actions import Schedule, check_placement
from core.pipeline.schedule.integer_schedule import Flat, Orders
from core.pipeline.schedule.list_scheduling import Policies, list_schedule
from core.pipeline.schedule.passes import add_recompute
from core.pipeline.schedule.player import Costs, Played, check, play
from core.pipeline.search.climb import Climber

INFINITE = float("inf")
PASS = 25  # a list scheduling pass takes the time of so many looks at each action
CLIMBERS = 8
SLACK = 1e-9  # sums of the same numbers in another order differ by less


@dataclass(frozen=True)
class Found:
    """What `search` comes to.

    ideal: time of the busiest rank's work, every R counted. bound: no schedule is faster. limits: per rank, empty
    without limit. named: (name, step) of the candidates that fit, fastest first. spent: work done, in the units
    of `budget`. cut: the seconds after which it was ended, 0 if it came to its own end. beside: per rank, memory that
    lives beside what is held between actions, where it was counted: `limits` are what was left for the schedule.
    """

    schedule: Schedule
    played: Played
    ideal: float
    bound: float
    limits: tuple[float, ...]
    named: tuple[tuple[str, float], ...]
    spent: int
    cut: float = 0.0
    beside: tuple[float, ...] = ()

    @property
    def over_ideal(self) -> float:
        """Step over ideal; 1 is no bubble at all."""
        return self.played.makespan / self.ideal if self.ideal else 1.0

    def summary(self, unit: str = "") -> str:
        """One line for the log. unit: of the memory."""
        peaks = self.played.peaks
        # of several ranks the one that is closest to its limit
        rank = max(range(len(peaks)), key=lambda r: peaks[r] - (self.limits[r] if self.limits else 0.0))
        beside = self.beside[rank] if self.beside else 0.0
        limit = f" of {self.limits[rank] + beside:.4g}" if self.limits else ""
        step, against = self.played.makespan, "no named schedule fits"
        if self.named:
            name, best = self.named[0]
            against = f"{step / best if best else 1.0:.3f} of the best named schedule's step ({name})"
        possible = f"at most {100 * (1 - self.bound / step if step else 0.0):.1f} % more is possible"
        bubble = f"auto: predicted bubble {100 * self.played.bubble:.1f} %"
        cut = f"; the search was ended after {self.cut:g} s" if self.cut else ""
        return f"{bubble}, peak {peaks[rank] + beside:.4g}{limit}{unit}; {against}, {possible}{cut}"


def search(
    placement: Sequence[int],
    microbatches: int,
    costs: Costs,
    *,
    recompute: Collection[int] = (),
    memory_limit: float | Sequence[float] | None = None,
    candidates: Iterable[Schedule] = (),
    budget: int | None = None,
    seconds: float = INFINITE,
    enough: float = SLACK,
    seed: int = 0,
) -> Found:
    """The fastest schedule found whose ranks stay within `memory_limit` (one number, or one per rank).

    recompute: stages whose F keeps no graph; they get an R, except where I follows F directly. candidates: named
    schedules of this placement, with or without R; the result is never slower than the best that fits, and is that
    candidate itself where nothing is faster. budget: how many actions to look at, over all schedules tried
    (default: `default_budget`); seconds: how long at most; candidates are always played. enough: it ends
    when no more than this part is possible.
    Raises ValueError: no schedule meets the limit (names the smallest that works), a candidate of another placement
    or number of microbatches, a rank without a stage.
    """
    end = perf_counter() + seconds
    check_placement(placement, max(placement) + 1)
    if microbatches < 1:
        raise ValueError(f"{microbatches} microbatches; a step needs at least 1")
    flat = Flat(placement, microbatches, costs, recompute)
    limits = _limits(memory_limit, flat.ranks)
    allowed = [limit * (1 + SLACK) for limit in limits or [INFINITE] * flat.ranks]
    named = _fitting(candidates, flat, costs, recompute, allowed)
    starts = _Starts(flat, allowed)
    for schedule, _ in named:
        starts.add(flat.orders(schedule))
    starts.add(flat.one_by_one())
    if not named and not starts.best:
        raise ValueError(_refusal(flat, limits))
    spent = _climb(flat, starts, default_budget(flat.actions) if budget is None else budget, seed, end, enough)
    makespan, orders = starts.best[0] if starts.best else (INFINITE, [])
    if named and named[0][1].makespan <= makespan:
        schedule, played = named[0]
    else:
        schedule = flat.schedule(orders)
        played = play(schedule, costs)
    steps = tuple((s.name, p.makespan) for s, p in named)
    cut = seconds if perf_counter() > end else 0.0
    return Found(schedule, played, max(flat.work), flat.bound(), limits, steps, spent, cut)


def default_budget(actions: int) -> int:
    """About 2 s for 256 actions and 12 s for 8192 on one core."""
    return 8_000_000 + 3_000 * actions


def _limits(memory_limit: float | Sequence[float] | None, ranks: int) -> tuple[float, ...]:
    if memory_limit is None:
        return ()
    limits = (memory_limit,) * ranks if isinstance(memory_limit, (int, float)) else tuple(memory_limit)
    if len(limits) != ranks:
        raise ValueError(f"{len(limits)} memory limits for {ranks} ranks; give one number, or one per rank")
    return limits


def _fitting(
    candidates: Iterable[Schedule], flat: Flat, costs: Costs, recompute: Collection[int], allowed: Sequence[float]
) -> list[tuple[Schedule, Played]]:
    """The candidates within the limits, R added, fastest first."""
    fitting = []
    for candidate in candidates:
        if candidate.placement != flat.placement:
            raise ValueError(
                f"candidate {candidate.name!r} has placement {candidate.placement}, the search {flat.placement}; "
                "leave it out or search on its placement"
            )
        schedule = add_recompute(candidate, recompute)
        check(schedule, flat.microbatches)
        played = play(schedule, costs)
        if all(peak <= limit for peak, limit in zip(played.peaks, allowed, strict=True)):
            fitting.append((schedule, played))
    return sorted(fitting, key=lambda pair: pair[1].makespan)


class _Starts:
    """The best few different schedules, fastest first."""

    def __init__(self, flat: Flat, allowed: Sequence[float]) -> None:
        self.flat, self.allowed = flat, allowed
        self.best: list[tuple[float, Orders]] = []

    def add(self, orders: Orders | None) -> float:
        """Keep it if it fits, is new and among the best; returns its makespan."""
        found = self.flat.score(orders) if orders else None
        if orders is None or found is None:
            return INFINITE
        makespan, peaks = found
        if any(peak > limit for peak, limit in zip(peaks, self.allowed, strict=True)):
            return INFINITE
        if all(orders != other for step, other in self.best if step == makespan):
            self.best.append((makespan, orders))
            self.best.sort(key=lambda pair: pair[0])
            del self.best[CLIMBERS:]
        return makespan


def _climb(flat: Flat, starts: _Starts, budget: int, seed: int, end: float, enough: float) -> int:
    """Improve `starts` until the budget is spent, the time over or the bound as good as reached; returns what was
    spent."""
    rng, bound = random.Random(seed), flat.bound() * (1 + enough)
    # half for list scheduling, but at most so many passes that nothing new is to be expected
    passes = min(budget // 2 // (PASS * max(1, flat.actions)), 1500)
    spent = _list_schedules(flat, starts, passes, bound, rng, end) * PASS * flat.actions
    looks = (budget - spent) // max(1, flat.actions)
    count = min(len(starts.best), CLIMBERS, looks // 1000 + 1)
    climbers = [Climber(flat, orders, starts.allowed, rng) for _, orders in starts.best[:count]]
    rounds = count.bit_length()
    for left in range(rounds, 0, -1):  # halving: each round has the same share, for half as many
        share = (budget - spent) // left // max(1, len(climbers))
        for climber in climbers:
            if climbers[0].best > bound:
                before = climber.spent
                climber.anneal(share, bound, end)
                spent += climber.spent - before
            climbers.sort(key=lambda c: c.best)
        climbers = climbers[: max(1, len(climbers) // 2)]
    for climber in climbers:
        starts.add(climber.best_orders)
    return spent


def _list_schedules(flat: Flat, starts: _Starts, passes: int, bound: float, rng: random.Random, end: float) -> int:
    """Policies at random, then variations of the best ones; returns how many passes that took."""
    policies = Policies(flat, rng)
    tried: dict = {}
    for number in range(passes):
        if starts.best and (starts.best[0][0] <= bound or perf_counter() > end):
            return number
        policy = policies.draw()
        if number > passes // 2:
            good = sorted(tried, key=lambda p: tried[p])[:5]
            policy = policies.vary(rng.choice(good))
        if policy not in tried:
            tried[policy] = starts.add(list_schedule(flat, starts.allowed, policy))
    return passes


def _refusal(flat: Flat, limits: Sequence[float]) -> str:
    """Both numbers and the remedy."""
    found = flat.score(flat.one_by_one())
    assert found is not None
    peaks = found[1]
    rank = max(range(flat.ranks), key=lambda r: peaks[r] - limits[r])
    equal = len(set(limits)) == 1
    smallest = max(peaks) if equal else peaks[rank]
    return (
        f"no schedule meets the memory limit {limits[rank]:g} of rank {rank}: one microbatch at a time already takes "
        f"{peaks[rank]:g}; the smallest limit that works is {_up(smallest)}{'' if equal else ' there'}. Raise the "
        "limit, recompute more stages, or use smaller microbatches"
    )


def _up(number: float) -> str:
    """At most 6 digits, rounded up, so that what is printed works as well."""
    return f"{float(Context(prec=6, rounding=ROUND_CEILING).create_decimal(Decimal(repr(number)))):g}"
