"""Squeezing (2405.15362): a repeated building block is packed denser in warm-up and cool-down, memory as before.

Whoever is free takes what the pattern does first among what can start and fits; W fill what is left. In the steady
phase that is the pattern itself; before and after it the pattern leaves units empty, which are filled here.
Standard library only.
"""

from collections.abc import Mapping, Sequence

from core.pipeline.schedule.actions import Schedule
from core.pipeline.schedule.integer_schedule import KINDS, SchedulingProblem, W
from core.pipeline.schedule.list_scheduling import ListScheduler, Policy
from core.pipeline.schedule.player import Costs

# Costs of a rank's whole slice, and a policy. Long schedules try the first few only.
POLICIES = (
    (Costs(), Policy(kinds="IFWR", pace=0.5)),
    (Costs(comm=0.05), Policy(kinds="IFWR", pace=0.5, patience=0.5)),
    (Costs(I=1.1, W=0.9), Policy(kinds="IFWR", pace=0.5, patience=0.5)),
    (Costs(), Policy(kinds="IFWR", pace=0.9)),
    (Costs(), Policy(kinds="IFWR", pace=1.0)),
    (Costs(I=1.1, W=0.9, comm=0.05), Policy(kinds="IFWR", pace=0.6, patience=0.5)),
    (Costs(I=1.2, W=0.8, comm=0.1), Policy(kinds="IFWR", pace=0.9)),
)
# W come after everything that the pattern names
WEIGHT_PREFERENCE = 1e18
MAX_ACTIONS = 100_000  # over all policies: about 1 s
# as transformers on one node have them
USUAL_COSTS = Costs(I=1.2, W=0.8, comm=0.1)
NEARLY_BEST = 1.005


class _PatternScheduler(ListScheduler):
    """A list scheduler that prefers the pattern's order. pattern_unit[action]: when the pattern does it."""

    def __init__(
        self,
        problem: SchedulingProblem,
        limits: Sequence[float],
        policy: Policy,
        pattern_unit: Sequence[float],
    ) -> None:
        super().__init__(problem, limits, policy)
        self.pattern_unit = pattern_unit

    def choose(self, rank: int, now: float) -> tuple[float, tuple[int, int, int] | None]:
        """As the base's, by another order."""
        best = None
        best_unit = float("inf")
        later = []
        for _, stage, microbatch, arrival, kind in self.options(rank):
            unit = WEIGHT_PREFERENCE
            if kind != W:
                unit = self.pattern_unit[self.problem.action(kind, stage, microbatch)]
            if arrival > now:
                later.append((arrival, unit))
            elif unit < best_unit:
                best = (stage, microbatch, kind)
                best_unit = unit
        if best is None:
            return min(later, default=(-1.0, 0.0))[0], None
        stage, _, kind = best
        until = (
            now + self.policy.patience * self.problem.duration[stage * self.problem.stride + kind]
        )
        worth_waiting = [arrival for arrival, unit in later if unit < best_unit and arrival < until]
        if worth_waiting:
            return (min(worth_waiting), None)
        return (now, best)


def squeeze(
    plain: Schedule, pattern: Mapping[tuple[str, int, int], int], max_active: int
) -> Schedule:
    """The schedule in which every rank does what `pattern` (kind, stage, microbatch) does first, as soon as it can.

    plain: the pattern as it is, W included. max_active: stage activations that a rank may hold. Of a few policies and
    `plain` it is the best for F = I = W; of those within 0.5 % of it the best for costs as they usually are.
    """
    placement = plain.placement
    count = plain.microbatches
    chunks = plain.stages // plain.ranks
    equal_problem = SchedulingProblem(placement, count, Costs().divided(chunks))
    usual_problem = SchedulingProblem(placement, count, USUAL_COSTS.divided(chunks))
    pattern_unit = [0.0] * equal_problem.size
    for (kind, stage, microbatch), unit in pattern.items():
        pattern_unit[equal_problem.action(KINDS.index(kind), stage, microbatch)] = unit

    # half an activation against rounding
    limits = [(max_active + 0.5) / chunks] * equal_problem.ranks
    attempts = [equal_problem.orders(plain)]
    for costs, policy in POLICIES[: MAX_ACTIONS // equal_problem.actions]:
        problem = SchedulingProblem(placement, count, costs.divided(chunks))
        attempts.append(_PatternScheduler(problem, limits, policy, pattern_unit).run())

    # (makespan for equal costs, for usual costs, orders)
    scored = []
    for orders in filter(None, attempts):
        equal_score = equal_problem.score(orders)
        usual_score = usual_problem.score(orders)
        assert equal_score is not None and usual_score is not None, (
            "both orders were played already"
        )
        scored.append((equal_score[0], usual_score[0], orders))
    allowed = NEARLY_BEST * min(makespan for makespan, _, _ in scored)
    nearly_best = [(usual, orders) for makespan, usual, orders in scored if makespan <= allowed]
    _, orders = min(nearly_best, key=lambda pair: pair[0])
    return equal_problem.schedule(orders, plain.name)
