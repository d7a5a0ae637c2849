"""Every named schedule, recompute policy, rank and microbatch count gives one process's loss, gradients and norm."""

import itertools

import pytest

from core.pipeline.schedule import schedules as named
from tests.marks import parts
from tests.parity.pipelines import differences, one_step, reference

SCHEDULES = list(named.NAMED)
POLICIES = ["none", "selective", "layer", "stage", "mixed"]
RANKS, MICROBATCHES, TIED, DROPOUT = [1, 2, 4], [1, 2, 3, 8], [False, True], [0.0, 0.1]
FACTORS = [SCHEDULES, POLICIES, RANKS, MICROBATCHES, TIED, DROPOUT]


def cover():
    """One configuration for each schedule and policy, in which every pair of values of two factors meets."""
    for i, j in itertools.product(range(len(SCHEDULES)), range(len(POLICIES))):
        world, m = RANKS[(i + j) % 3], MICROBATCHES[(i // 3 + j) % 4]
        yield SCHEDULES[i], POLICIES[j], world, m, TIED[(i + i // 2 + j) % 2], DROPOUT[(i // 2 + j // 2) % 2]


def test_the_cover_meets_every_pair():
    for (a, one), (b, other) in itertools.combinations(enumerate(FACTORS), 2):
        assert {(c[a], c[b]) for c in cover()} == set(itertools.product(one, other)), (a, b)


def compare(cases):
    """What is wrong, by configuration, and which parameters this rank holds."""
    wrong, names = {}, {}
    for case in cases:
        schedule, recompute, _, m, tied, dropout = case
        found = one_step(schedule, recompute, m, tied, dropout)
        names[case] = set(found[0])
        if told := differences(found, reference(m, tied, dropout)):
            wrong[case] = told
    return wrong, names


def check(ranks, cases, timeout=180.0):
    for world in RANKS:
        mine = [case for case in cases if case[2] == world]
        answers = ranks(compare, mine, world=world, timeout=timeout)
        assert [wrong for wrong, _ in answers] == [{}] * world
        for case in mine:
            everything = set().union(*(names[case] for _, names in answers))
            assert everything == set(reference(*case[3:])[0]), "every parameter lives somewhere"


def test_a_cover_of_all_schedules_equals_one_process(ranks):
    check(ranks, list(cover()))


@pytest.mark.parametrize("options", parts(list(itertools.product(*FACTORS[1:])), every=7))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_one_process(ranks, schedule, options):
    check(ranks, [(schedule, *values) for values in options], 300.0)
