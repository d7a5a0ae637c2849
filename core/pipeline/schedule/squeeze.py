"""A pattern that every microbatch repeats, moved together: warm-up and end denser, memory as before.

Whoever is free takes what the pattern does first among what can start and fits; W fill what is left. In the steady
state that is the pattern itself; before and after it, where the pattern's units stand empty, it is denser (what
2405.15362 calls squeezing). Standard library only.
"""

from collections.abc import Mapping, Sequence

from core.pipeline.schedule.actions import Schedule
from core.pipeline.schedule.integer_schedule import KINDS, Flat, W
from core.pipeline.schedule.list_scheduling import Policy, Run
from core.pipeline.schedule.player import Costs

# of a rank's whole slice; the first ones only where a schedule is long
POLICIES = (
    (Costs(), Policy(kinds="IFWR", pace=0.5)),
    (Costs(comm=0.05), Policy(kinds="IFWR", pace=0.5, patience=0.5)),
    (Costs(I=1.1, W=0.9), Policy(kinds="IFWR", pace=0.5, patience=0.5)),
    (Costs(), Policy(kinds="IFWR", pace=0.9)),
    (Costs(), Policy(kinds="IFWR", pace=1.0)),
    (Costs(I=1.1, W=0.9, comm=0.05), Policy(kinds="IFWR", pace=0.6, patience=0.5)),
    (Costs(I=1.2, W=0.8, comm=0.1), Policy(kinds="IFWR", pace=0.9)),
)
LAST = 1e18  # what W is preferred like
MANY = 100_000  # actions, over all policies: about 1 s
USUAL, NEAR = Costs(I=1.2, W=0.8, comm=0.1), 1.005


class _ByPattern(Run):
    """prefer[a]: when the pattern does action a; of W, never."""

    def __init__(self, flat: Flat, limits: Sequence[float], policy: Policy, prefer: Sequence[float]) -> None:
        super().__init__(flat, limits, policy)
        self.prefer = prefer

    def choose(self, rank: int, now: float) -> tuple[float, tuple[int, int, int] | None]:
        """As the base's, by another order."""
        best, key, later = None, float("inf"), []
        for _, s, m, arrival, kind in self.options(rank):
            mine = LAST if kind == W else self.prefer[self.flat.action(kind, s, m)]
            if arrival > now:
                later.append((arrival, mine))
            elif mine < key:
                best, key = (s, m, kind), mine
        if best is None:
            return min(later, default=(-1.0, 0.0))[0], None
        until = now + self.policy.patience * self.flat.duration[best[0] * self.flat.step + best[2]]
        better = [arrival for arrival, mine in later if mine < key and arrival < until]
        return (min(better), None) if better else (now, best)


def squeeze(plain: Schedule, pattern: Mapping[tuple[str, int, int], int], most: int) -> Schedule:
    """The schedule in which every rank does what `pattern` (kind, stage, microbatch) does first, as soon as it can.

    plain: the pattern as it is, W included. most: stage activations that a rank may hold. Of a few policies and
    `plain` the best for F = I = W; of those within 0.5 % of it the best for costs as they usually are.
    """
    placement, count = plain.placement, plain.microbatches
    chunks = plain.stages // plain.ranks
    flat, usual = (Flat(placement, count, costs.divided(chunks)) for costs in (Costs(), USUAL))
    prefer = [0.0] * flat.size
    for (kind, s, m), unit in pattern.items():
        prefer[flat.action(KINDS.index(kind), s, m)] = unit
    limits = [(most + 0.5) / chunks] * flat.ranks
    tried = [flat.orders(plain)]
    for costs, policy in POLICIES[: MANY // flat.actions]:
        tried.append(_ByPattern(Flat(placement, count, costs.divided(chunks)), limits, policy, prefer).go())
    steps = []
    for orders in filter(None, tried):
        equal, often = flat.score(orders), usual.score(orders)
        assert equal is not None and often is not None, "both orders were played already"
        steps.append((equal[0], often[0], orders))
    enough = NEAR * min(equal for equal, _, _ in steps)
    _, orders = min(((often, orders) for equal, often, orders in steps if equal <= enough), key=lambda pair: pair[0])
    return flat.schedule(orders, plain.name)
