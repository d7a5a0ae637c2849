"""The automatic schedule: named ones, list scheduling, then annealing, under a memory limit.

Standard library only; the same arguments give the same schedule, unless a limit of seconds ends the search.
"""

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from time import perf_counter

from core.pipeline.schedule.actions import Schedule, check_placement
from core.pipeline.schedule.integer_schedule import IntegerOrders, SchedulingProblem
from core.pipeline.schedule.list_scheduling import Policies, Policy, list_schedule
from core.pipeline.schedule.passes import add_recompute
from core.pipeline.schedule.player import Costs, Played, check, play
from core.pipeline.search.climb import Climber

INFINITE = float("inf")
# a list scheduling pass takes the time of so many looks at each action
PASS_COST = 25
MAX_PASSES = 1500  # after which list scheduling finds nothing new
MAX_CLIMBERS = 8
# sums of the same numbers in another order differ by less
SLACK = 1e-9


@dataclass(frozen=True)
class SearchResult:
    """What `search` comes to.

    ideal: time of the busiest rank's work, every R counted. bound: no schedule is faster. limits: per rank, empty
    without limit. named: (name, step) of the candidates that fit, fastest first. spent: work done, in the units
    of `budget`. time_limit: the seconds after which it was ended, 0 if it came to its own end. memory_beside: per
    rank, what lives beside the activations held between actions, where it was counted: `limits` are what was left
    for the schedule.
    """

    schedule: Schedule
    played: Played
    ideal: float
    bound: float
    limits: tuple[float, ...]
    named: tuple[tuple[str, float], ...]
    spent: int
    time_limit: float = 0.0
    memory_beside: tuple[float, ...] = ()

    @property
    def over_ideal(self) -> float:
        """Step over ideal; 1 is no bubble at all."""
        if not self.ideal:
            return 1.0
        return self.played.makespan / self.ideal

    def summary(self, unit: str = "") -> str:
        """One line for the log. unit: of the memory."""
        # of several ranks the one that is closest to its limit
        peaks = self.played.peaks
        limits = self.limits or (0.0,) * len(peaks)
        rank = max(range(len(peaks)), key=lambda r: peaks[r] - limits[r])
        beside = self.memory_beside[rank] if self.memory_beside else 0.0
        limit_text = ""
        if self.limits:
            limit_text = f" of {self.limits[rank] + beside:.4g}"

        step = self.played.makespan
        comparison = "no named schedule fits"
        if self.named:
            name, best_named = self.named[0]
            ratio = step / best_named if best_named else 1.0
            comparison = f"{ratio:.3f} of the best named schedule's step ({name})"
        remaining = 1 - self.bound / step if step else 0.0
        ended = ""
        if self.time_limit:
            ended = f"; the search was ended after {self.time_limit:g} s"
        return (
            f"auto: predicted bubble {100 * self.played.bubble:.1f} %, "
            f"peak {peaks[rank] + beside:.4g}{limit_text}{unit}; "
            f"{comparison}, at most {100 * remaining:.1f} % more is possible{ended}"
        )


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
) -> SearchResult:
    """The fastest schedule found whose ranks stay within `memory_limit` (one number, or one per rank).

    recompute: stages whose F keeps no graph; they get an R, except where I follows F directly. candidates: named
    schedules of this placement, with or without R; the result is never slower than the best that fits, and is that
    candidate itself where nothing is faster. budget: how many actions to look at, over all schedules tried
    (default: `default_budget`); seconds: how long at most; candidates are always played. enough: it ends
    when no more than this part is possible.
    Raises ValueError: no schedule meets the limit (names the smallest that works), a candidate of another placement
    or number of microbatches, a rank without a stage.
    """
    deadline = perf_counter() + seconds
    check_placement(placement, max(placement) + 1)
    if microbatches < 1:
        raise ValueError(f"{microbatches} microbatches; a step needs at least 1")
    problem = SchedulingProblem(placement, microbatches, costs, recompute)
    limits = _limits_per_rank(memory_limit, problem.ranks)
    allowed = [limit * (1 + SLACK) for limit in limits or [INFINITE] * problem.ranks]

    # start from the named schedules that fit, and from one microbatch at a time, which needs the least memory
    named = _fitting_candidates(candidates, problem, costs, recompute, allowed)
    starts = _BestOrders(problem, allowed)
    for schedule, _ in named:
        starts.add(problem.orders(schedule))
    starts.add(problem.one_by_one())
    if not named and not starts.best:
        raise ValueError(_no_fit_message(problem, limits))

    if budget is None:
        budget = default_budget(problem.actions)
    spent = _improve(problem, starts, budget, seed, deadline, enough)
    # a named schedule is kept where nothing is faster: its name says more than "auto"
    makespan, orders = starts.best[0] if starts.best else (INFINITE, [])
    if named and named[0][1].makespan <= makespan:
        schedule, played = named[0]
    else:
        schedule = problem.schedule(orders)
        played = play(schedule, costs)
    named_steps = tuple((candidate.name, result.makespan) for candidate, result in named)
    time_limit = seconds if perf_counter() > deadline else 0.0
    return SearchResult(
        schedule, played, max(problem.work), problem.bound(), limits, named_steps, spent, time_limit
    )


def default_budget(actions: int) -> int:
    """About 2 s for 256 actions and 12 s for 8192 on one core."""
    return 8_000_000 + 3_000 * actions


def _limits_per_rank(memory_limit: float | Sequence[float] | None, ranks: int) -> tuple[float, ...]:
    if memory_limit is None:
        return ()
    if isinstance(memory_limit, (int, float)):
        return (memory_limit,) * ranks
    limits = tuple(memory_limit)
    if len(limits) != ranks:
        raise ValueError(
            f"{len(limits)} memory limits for {ranks} ranks; give one number, or one per rank"
        )
    return limits


def _fitting_candidates(
    candidates: Iterable[Schedule],
    problem: SchedulingProblem,
    costs: Costs,
    recompute: Collection[int],
    allowed: Sequence[float],
) -> list[tuple[Schedule, Played]]:
    """The candidates within the limits, R added, fastest first."""
    fitting = []
    for candidate in candidates:
        if candidate.placement != problem.placement:
            raise ValueError(
                f"candidate {candidate.name!r} has placement {candidate.placement}, the search {problem.placement}; "
                "leave it out or search on its placement"
            )
        schedule = add_recompute(candidate, recompute)
        check(schedule, problem.microbatches)
        played = play(schedule, costs)
        if all(peak <= limit for peak, limit in zip(played.peaks, allowed, strict=True)):
            fitting.append((schedule, played))
    return sorted(fitting, key=lambda pair: pair[1].makespan)


class _BestOrders:
    """The best few different schedules, fastest first."""

    def __init__(self, problem: SchedulingProblem, allowed: Sequence[float]) -> None:
        self.problem = problem
        self.allowed = allowed
        self.best: list[tuple[float, IntegerOrders]] = []

    def add(self, orders: IntegerOrders | None) -> float:
        """Keep it if it fits, is new and among the best; returns its makespan, infinite if it does not fit."""
        if not orders:
            return INFINITE
        score = self.problem.score(orders)
        if score is None:
            return INFINITE  # a deadlock
        makespan, peaks = score
        if any(peak > limit for peak, limit in zip(peaks, self.allowed, strict=True)):
            return INFINITE
        equally_fast = [other for other_makespan, other in self.best if other_makespan == makespan]
        if orders not in equally_fast:
            self.best.append((makespan, orders))
            self.best.sort(key=lambda pair: pair[0])
            del self.best[MAX_CLIMBERS:]
        return makespan


def _improve(
    problem: SchedulingProblem,
    starts: _BestOrders,
    budget: int,
    seed: int,
    deadline: float,
    enough: float,
) -> int:
    """Improve `starts` until the budget is spent, the time over or the bound as good as reached; returns what was
    spent."""
    rng = random.Random(seed)
    bound = problem.bound() * (1 + enough)
    actions = max(1, problem.actions)

    # half of the budget for list scheduling, but no more passes than are useful
    passes = min(budget // 2 // (PASS_COST * actions), MAX_PASSES)
    spent = (
        _list_schedules(problem, starts, passes, bound, rng, deadline) * PASS_COST * problem.actions
    )

    # the rest for annealing, by successive halving: each round has the same share, for half as many climbers
    remaining_looks = (budget - spent) // actions
    count = min(len(starts.best), MAX_CLIMBERS, remaining_looks // 1000 + 1)
    climbers = [Climber(problem, orders, starts.allowed, rng) for _, orders in starts.best[:count]]
    for rounds_left in range(count.bit_length(), 0, -1):
        share = (budget - spent) // rounds_left // max(1, len(climbers))
        for climber in climbers:
            if climbers[0].best > bound:
                before = climber.spent
                climber.anneal(share, bound, deadline)
                spent += climber.spent - before
            climbers.sort(key=lambda c: c.best)
        climbers = climbers[: max(1, len(climbers) // 2)]
    for climber in climbers:
        starts.add(climber.best_orders)
    return spent


def _list_schedules(
    problem: SchedulingProblem,
    starts: _BestOrders,
    passes: int,
    bound: float,
    rng: random.Random,
    deadline: float,
) -> int:
    """Policies at random, then variations of the best ones; returns how many passes that took."""
    policies = Policies(problem, rng)
    makespans: dict[Policy, float] = {}
    for number in range(passes):
        is_done = starts.best and starts.best[0][0] <= bound
        if is_done or (starts.best and perf_counter() > deadline):
            return number
        # the first half explores, the second varies the five best
        policy = policies.draw()
        if number > passes // 2:
            best_policies = sorted(makespans, key=lambda tried: makespans[tried])[:5]
            policy = policies.vary(rng.choice(best_policies))
        if policy not in makespans:
            makespans[policy] = starts.add(list_schedule(problem, starts.allowed, policy))
    return passes


def _no_fit_message(problem: SchedulingProblem, limits: Sequence[float]) -> str:
    """The message where no schedule fits: both numbers and the remedy."""
    score = problem.score(problem.one_by_one())
    assert score is not None
    peaks = score[1]
    rank = max(range(problem.ranks), key=lambda r: peaks[r] - limits[r])
    # one limit for all must be enough for the fullest rank; limits per rank are named one by one
    smallest = peaks[rank]
    on_this_rank = " there"
    if len(set(limits)) == 1:
        smallest = max(peaks)
        on_this_rank = ""
    return (
        f"no schedule meets the memory limit {limits[rank]:g} of rank {rank}: one microbatch at a time already takes "
        f"{peaks[rank]:g}; the smallest limit that works is {_round_up(smallest)}{on_this_rank}. Raise the "
        "limit, recompute more stages, or use smaller microbatches"
    )


def _round_up(number: float) -> str:
    """At most 6 digits, rounded up, so that what is printed works as a limit."""
    context = Context(prec=6, rounding=ROUND_CEILING)
    return f"{float(context.create_decimal(Decimal(repr(number)))):g}"
