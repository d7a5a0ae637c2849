"""The automatic schedule: near the optimum, within memory, never slower than a candidate, the same every time."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.pipeline.schedule import schedules
from core.pipeline.schedule.actions import Action, Schedule, looped, v_shape
from core.pipeline.schedule.integer_schedule import SchedulingProblem
from core.pipeline.schedule.list_scheduling import Policies, list_schedule
from core.pipeline.schedule.passes import add_recompute
from core.pipeline.schedule.player import Costs, check, play
from core.pipeline.search.search import default_budget, search
from tests.marks import PRODUCT, thinned
from tests.pipeline.exact import Exact

RECOMPUTED = Costs(F=1.0, R=1.0, I=1.15, W=0.85, saved=0.1, graph=1.0, waiting=1.0)  # of a rank's whole slice
DELAYED = Costs(F=1.0, R=1.0, I=1.15, W=0.85, comm=0.05, saved=0.1, graph=1.0, waiting=1.0)


def goal(placement, microbatches, costs, limit, recomputed, **more):
    stages = range(len(placement)) if recomputed else ()
    found = search(placement, microbatches, costs, recompute=stages, memory_limit=limit, **more)
    check(found.schedule, microbatches)
    assert found.played == play(found.schedule, costs)
    assert limit is None or found.played.peak <= limit * (1 + 1e-9)
    assert found.played.makespan >= found.bound * (1 - 1e-9)
    return found.over_ideal


def gpipe(placement, microbatches, name="gpipe"):
    """Every F, then every B: any placement."""
    ranks, stages = max(placement) + 1, len(placement)
    orders = [[] for _ in range(ranks)]
    for kind, order in (("F", range(stages)), ("B", reversed(range(stages)))):
        for s in order:
            orders[placement[s]] += [Action(kind, s, m) for m in range(microbatches)]
    return Schedule.make(placement, orders, name)


def one_f_one_b(ranks, microbatches):
    orders = []
    for r in range(ranks):
        warm = min(ranks - 1 - r, microbatches)
        order = [Action("F", r, m) for m in range(warm)]
        for m in range(microbatches):
            order += [Action("F", r, warm + m)] if warm + m < microbatches else []
            order.append(Action("B", r, m))
        orders.append(order)
    return Schedule.make(looped(ranks), orders, "1f1b")


def test_the_issues_goals():
    costs = RECOMPUTED.divided(2)
    assert goal(v_shape(4), 8, costs, 2.0, True, budget=4_000_000) <= 1.065  # the issue asks for 1.09
    assert goal(v_shape(4), 8, costs, 4.0, True) <= 1.047  # and for 1.06; this is the lower bound


@pytest.mark.parametrize(
    ("placement", "microbatches", "costs", "limit", "recomputed", "most"),
    [
        (v_shape(4), 8, Costs().divided(2), 4.0, False, 1.0625),
        (v_shape(8), 16, Costs().divided(2), 8.0, False, 1.073),
        (looped(4, 2), 8, Costs().divided(2), 4.0, False, 1.0625),
        (looped(4), 8, Costs(), 4.0, False, 1.125),
        (v_shape(8), 16, DELAYED.divided(2), 8.0, True, 1.0602),
        (looped(4, 2), 8, RECOMPUTED.divided(2), 4.0, True, 1.0313),
    ],
)
def test_reaches_the_lower_bound_where_memory_allows(placement, microbatches, costs, limit, recomputed, most):
    assert goal(placement, microbatches, costs, limit, recomputed, budget=3_000_000) <= most


@pytest.mark.full
@pytest.mark.parametrize(
    ("placement", "microbatches", "costs", "limit", "recomputed", "most"),
    [
        pytest.param(v_shape(4), 8, RECOMPUTED.divided(2), 1.5, True, 1.08, marks=PRODUCT),
        (v_shape(4), 8, RECOMPUTED.divided(2), 2.0, True, 1.062),
        (v_shape(4), 8, Costs().divided(2), 3.0, False, 1.11),
        (v_shape(8), 16, DELAYED.divided(2), 2.0, True, 1.125),
        pytest.param(v_shape(8), 16, DELAYED.divided(2), 4.0, True, 1.085, marks=PRODUCT),
        (looped(4), 8, RECOMPUTED, 2.0, True, 1.11),
        pytest.param(v_shape(16), 64, DELAYED.divided(2), 4.0, True, 1.075, marks=PRODUCT),
    ],
)
def test_goals_under_tight_memory(placement, microbatches, costs, limit, recomputed, most):
    assert goal(placement, microbatches, costs, limit, recomputed) <= most


@st.composite
def problems(draw, most_ranks=4, most_microbatches=5):
    ranks = draw(st.integers(1, most_ranks))
    placement = draw(st.sampled_from([looped(ranks), looped(ranks, 2), v_shape(ranks), v_shape(ranks, 3)]))
    stages = len(placement)

    def per_stage(low, high):
        return draw(st.lists(st.integers(low, high).map(lambda n: n / 4), min_size=stages, max_size=stages))

    costs = Costs(
        F=per_stage(0, 8),
        I=per_stage(0, 8),
        W=per_stage(0, 8),
        R=per_stage(0, 8),
        comm=draw(st.sampled_from([0.0, 0.1, 1.0])),
        saved=per_stage(0, 2),
        graph=per_stage(2, 8),
        waiting=per_stage(0, 8),
    )
    recompute = draw(st.frozensets(st.integers(0, stages - 1)))
    return placement, draw(st.integers(1, most_microbatches)), costs, recompute


def least_memory(placement, microbatches, costs, recompute):
    """Of each rank, for one microbatch at a time: no schedule needs less."""
    integers = SchedulingProblem(placement, microbatches, costs, recompute)
    return integers.score(integers.one_by_one())[1]


@settings(max_examples=30, deadline=None)
@given(problems(), st.sampled_from([None, 1.0, 1.1, 1.5, 3.0]), st.booleans())
def test_every_result_is_complete_and_fits_and_beats_the_candidates(problem, room, each):
    placement, microbatches, costs, recompute = problem
    least = least_memory(*problem)
    limit = None if room is None else [room * peak for peak in least] if each else room * max(least)
    candidates = [gpipe(placement, microbatches)]
    if placement == looped(len(placement)):
        candidates.append(one_f_one_b(len(placement), microbatches))
    found = search(
        placement, microbatches, costs, recompute=recompute, memory_limit=limit, candidates=candidates, budget=30_000
    )
    check(found.schedule, microbatches)
    assert found.played == play(found.schedule, costs)
    limits = [float("inf")] * len(least) if limit is None else limit if each else [limit] * len(least)
    assert all(peak <= most * (1 + 1e-9) for peak, most in zip(found.played.peaks, limits, strict=True))
    for candidate in (play(add_recompute(c, recompute), costs) for c in candidates):
        if all(peak <= most for peak, most in zip(candidate.peaks, limits, strict=True)):
            assert found.played.makespan <= candidate.makespan
    assert found.bound <= found.played.makespan * (1 + 1e-9)
    assert found.spent <= 30_000
    again = {(s, m) for s in recompute for m in range(microbatches)} - found.schedule.recomputed
    for s, m in again:  # an R is left out only where I follows F directly
        order = found.schedule.orders[placement[s]]
        assert order[order.index(Action("F", s, m)) + 1].kind in "IB"


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from([None, 1.0, 1.3, 2.0]), st.integers(0, 99))
def test_every_stage_does_its_microbatches_in_order(problem, room, seed):
    """Batch norms and losses see them one after the other, whatever the search found."""
    placement, microbatches, costs, recompute = problem
    limit = None if room is None else [room * peak for peak in least_memory(*problem)]
    found = search(placement, microbatches, costs, recompute=recompute, memory_limit=limit, budget=60_000, seed=seed)
    for stage, rank in enumerate(placement):
        order = [a.microbatch for a in found.schedule.orders[rank] if a.kind == "F" and a.stage == stage]
        assert order == list(range(microbatches))


def test_the_search_ends_after_the_seconds_it_has_and_says_so():
    facts = dict(placement=v_shape(8), microbatches=64, costs=DELAYED.divided(2), memory_limit=5.0)
    begin = time.perf_counter()
    found = search(**facts, candidates=[schedules.make("v-half", 8, 64)], seconds=0.3)
    assert time.perf_counter() - begin < 3, "beyond it only what is under way: one pass, and playing the result"
    assert found.time_limit == 0.3 and "the search was ended after 0.3 s" in found.summary()
    assert found.played.makespan <= found.named[0][1]


def test_the_search_ends_where_little_is_possible():
    facts = dict(placement=v_shape(4), microbatches=32, costs=Costs().divided(2))
    found = search(**facts, candidates=schedules.candidates(v_shape(4), 32), enough=0.01)
    assert found.spent == 0 and found.time_limit == 0 and found.played.makespan <= found.bound * 1.01


@settings(max_examples=40, deadline=None)
@given(problems(), st.randoms(use_true_random=False), st.sampled_from([1.0, 1.3, 2.0]))
def test_the_fast_score_equals_the_player(problem, rng, room):
    _, microbatches, costs, _ = problem
    integers = SchedulingProblem(*problem)
    limits = [room * peak + 1e-9 for peak in least_memory(*problem)]
    policies = Policies(integers, random.Random(rng.random()))
    orders = None
    for _ in range(1 + int(rng.random() * 10)):
        orders = list_schedule(integers, limits, policies.draw()) or orders
    for order in orders:  # and some disorder, which may well deadlock
        k = int(rng.random() * (len(order) - 1))
        if order[k] // 4 != order[k + 1] // 4:
            order[k : k + 2] = reversed(order[k : k + 2])
    schedule, score = integers.schedule(orders), integers.score(orders)
    if score is None:
        with pytest.raises(ValueError, match="never ends"):
            play(schedule, costs)
        return
    check(schedule, microbatches)
    played = play(schedule, costs)
    assert score == (played.makespan, list(played.peaks))
    assert integers.schedule(integers.orders(schedule)) == schedule


@settings(max_examples=30, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_a_careful_pass_never_gets_stuck(problem, rng):
    integers = SchedulingProblem(*problem)
    limits = [peak * (1 + 1e-9) for peak in least_memory(*problem)]
    policies = Policies(integers, random.Random(rng.random()))
    policies.choices["careful"] = (True,)
    for _ in range(12):
        orders = list_schedule(integers, limits, policies.draw())
        assert orders
        assert all(peak <= most for peak, most in zip(integers.score(orders)[1], limits, strict=True))


TINY = [
    (looped(2), 2, Costs(), (), None),
    (looped(2), 3, RECOMPUTED, range(2), 1.2),
    (looped(2), 3, Costs(F=[1, 1.5], I=[1.3, 0.7], W=[0.4, 1.1], comm=0.2), (), 2.0),
    (looped(3), 2, DELAYED, range(3), 1.2),
    (looped(2, 2), 2, DELAYED.divided(2), range(4), 1.2),
    (v_shape(2), 2, RECOMPUTED.divided(2), range(4), 1.0),
    (v_shape(2), 3, Costs().divided(2), (), 1.5),
    (looped(2, 2), 3, Costs(F=1.0, I=1.3, W=0.6, comm=0.1).divided(2), (), 2.0),
]


def against_the_optimum(placement, microbatches, costs, recompute, limit, budget):
    found = search(placement, microbatches, costs, recompute=recompute, memory_limit=limit, budget=budget)
    limits = [limit] * (max(placement) + 1) if isinstance(limit, float) else limit
    exact = Exact(placement, microbatches, costs, recompute, limits).optimum(found.played.makespan)
    assert found.bound <= exact * (1 + 1e-9)
    assert found.played.makespan <= 1.02 * exact
    return found.played.makespan / exact


@pytest.mark.parametrize("case", TINY)
def test_within_two_percent_of_the_optimum(case):
    against_the_optimum(*case, budget=700_000)


@pytest.mark.full
def test_within_two_percent_of_the_optimum_at_tight_memory_on_three_ranks():
    against_the_optimum(
        v_shape(3), 2, Costs(F=1, R=1, I=1.15, W=0.85, comm=0.1, saved=0.1).divided(2), range(6), 1.0, None
    )


@pytest.mark.full
@pytest.mark.parametrize("seed", thinned(range(12), every=4))
def test_within_two_percent_of_the_optimum_for_random_costs(seed):
    rng = random.Random(seed)
    shapes = [(looped(2), 3), (looped(3), 2), (looped(2, 2), 2), (v_shape(2), 2)]
    placement, microbatches = rng.choice(shapes)
    stages = range(len(placement))
    times = {kind: [rng.choice((0.5, 0.75, 1.0, 1.25, 1.5)) for _ in stages] for kind in "FRIW"}
    costs = Costs(**times, comm=rng.choice((0, 0.1, 0.3)), saved=0.1, waiting=rng.choice((0.5, 1.0)))
    recompute = rng.choice(((), stages))
    room = rng.choice((1.0, 1.2, 1.5, 2.0, 100.0))
    limits = [room * peak for peak in least_memory(placement, microbatches, costs, recompute)]
    against_the_optimum(placement, microbatches, costs, recompute, limits, None)


def test_same_arguments_same_schedule():
    first, second = (
        search(v_shape(3), 4, RECOMPUTED.divided(2), recompute=range(6), memory_limit=1.5, budget=300_000)
        for _ in range(2)
    )
    assert first == second


def test_a_limit_that_no_schedule_meets_names_the_smallest_that_works():
    costs = Costs(saved=[0.1, 0.2, 0.1, 1 / 3], graph=[1.0, 2 / 3, 1.0, 1.0])
    arguments = dict(placement=v_shape(2), microbatches=3, costs=costs, recompute=range(4), budget=0)
    with pytest.raises(ValueError, match=r"memory limit 1 of rank 1.*takes 1\.2; .*works is 1\.2\. Raise"):
        search(**arguments, memory_limit=1.0)
    assert search(**arguments, memory_limit=1.2).played.peak == pytest.approx(1.2)
    with pytest.raises(ValueError, match=r"memory limit 0\.5 of rank 1.*works is 1\.2 there"):
        search(**arguments, memory_limit=[1.1, 0.5])
    with pytest.raises(ValueError, match="3 memory limits for 2 ranks"):
        search(**arguments, memory_limit=[1, 1, 1])


def test_a_printed_smallest_limit_is_rounded_up():
    arguments = dict(placement=looped(2), microbatches=2, costs=Costs(graph=2 / 3, waiting=0.1), budget=0)
    with pytest.raises(ValueError, match=r"works is 0\.666667\."):
        search(**arguments, memory_limit=0.5)
    search(**arguments, memory_limit=0.666667)


def test_a_candidate_that_nothing_beats_is_returned_itself():
    candidate = one_f_one_b(1, 3)
    found = search((0,), 3, Costs(), candidates=[gpipe((0,), 3), candidate])
    assert found.schedule.name == "gpipe" and found.spent == 0
    assert found.named == (("gpipe", 9.0), ("1f1b", 9.0))
    within = search((0,), 3, Costs(), candidates=[gpipe((0,), 3), candidate], memory_limit=1)
    assert within.schedule == candidate and within.named == (("1f1b", 9.0),)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match=r"'gpipe' has placement \(0, 1\).*search \(0, 1, 1, 0\)"):
        search(v_shape(2), 2, Costs(), candidates=[gpipe((0, 1), 2)])
    with pytest.raises(ValueError, match="0 microbatches; a step needs at least 1"):
        search((0, 1), 0, Costs())
    with pytest.raises(ValueError, match=r"misses 0F2"):
        search((0, 1), 3, Costs(), candidates=[gpipe((0, 1), 2)])


def test_the_summary_says_what_matters():
    found = search(looped(2), 4, Costs(), memory_limit=[2, 4], candidates=[one_f_one_b(2, 4)], budget=200_000)
    line = found.summary()
    assert line.startswith(
        "auto: predicted bubble 7.7 %, peak 2 of 2; 0.929 of the best named schedule's step (1f1b)"
    )
    assert line.endswith("at most 0.0 % more is possible")
    assert found.summary(" MiB").startswith("auto: predicted bubble 7.7 %, peak 2 of 2 MiB; ")


def test_the_budget_bounds_the_work():
    costs = RECOMPUTED.divided(2)
    spent = [
        search(v_shape(4), 8, costs, recompute=range(8), memory_limit=1.5, budget=b).spent for b in (0, 10**5, 10**6)
    ]
    assert spent[0] == 0 and 5e4 < spent[1] <= 1e5 and 9e5 < spent[2] <= 1e6
    assert default_budget(8192) < 5 * default_budget(256)
