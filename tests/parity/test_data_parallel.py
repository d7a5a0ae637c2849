"""Every ZeRO stage, schedule, recomputation, tied or not, with dropout: one process's gradients and norm."""

import itertools

import pytest

from core.autograd import apply_recompute
from core.data_parallel import DataParallel
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules as named
from core.training import next_token_loss
from tests.marks import parts
from tests.parity.pipelines import SEED, batch, build, differences
from tests.parity.shards import norm, whole_gradients
from tests.parity.test_pipeline_meshes import FEW, M, one_process
from tests.states import state

ZERO, SCHEDULES, POLICIES = (
    [0, 1, 2, 3],
    ["none", "1f1b", "zb-v", "interleaved-zb"],
    ["none", "selective", "layer", "stage"],
)
TIED, DROPOUT = [False, True], [0.0, 0.1]
FACTORS = [ZERO, SCHEDULES, POLICIES, TIED, DROPOUT]


def allowed(case):
    """Recomputing whole stages is an action of a schedule."""
    return not (case[1] == "none" and case[2] == "stage")


COVER = [  # every pair of values of two factors, where allowed
    (0, "none", "none", False, 0.0),
    (0, "1f1b", "selective", True, 0.1),
    (1, "zb-v", "layer", False, 0.1),
    (1, "interleaved-zb", "stage", True, 0.0),
    (2, "none", "none", True, 0.1),
    (2, "1f1b", "selective", False, 0.0),
    (3, "zb-v", "layer", True, 0.0),
    (3, "interleaved-zb", "stage", False, 0.1),
    (0, "zb-v", "stage", False, 0.0),
    (0, "interleaved-zb", "layer", False, 0.0),
    (1, "none", "selective", False, 0.0),
    (1, "1f1b", "none", False, 0.0),
    (2, "none", "layer", False, 0.0),
    (2, "1f1b", "stage", False, 0.0),
    (2, "zb-v", "none", False, 0.0),
    (2, "interleaved-zb", "none", False, 0.0),
    (3, "none", "none", False, 0.0),
    (3, "1f1b", "selective", False, 0.0),
    (0, "1f1b", "layer", False, 0.0),
    (0, "zb-v", "selective", False, 0.0),
    (0, "interleaved-zb", "selective", False, 0.0),
]


def test_the_cover_meets_every_pair():
    everything = [case for case in itertools.product(*FACTORS) if allowed(case)]
    for a, b in itertools.combinations(range(len(FACTORS)), 2):
        assert {(c[a], c[b]) for c in COVER} == {(c[a], c[b]) for c in everything}, (a, b)


def executor_of(stages, ps, schedule, policy, shard):
    if schedule != "none":
        facts = {"schedule": schedule, "recompute": policy, "num_microbatches": M}
        return Pipeline(stages, ps=ps, grad_sync=shard, seed=SEED, **facts)
    (model,) = stages.values()
    apply_recompute(model, policy, stage=model.stage)
    return SingleStage(model, ps=ps, num_microbatches=M, grad_sync=shard, seed=SEED)


def two_steps(case, **sizes):
    """(whole gradients, loss, norm) of the second of two equal steps, on this rank's rows of the global batch."""
    zero, schedule, policy, tied, dropout = case
    ps = state(pp=1 if schedule == "none" else 2, **sizes)
    placement = (0,) if schedule == "none" else named.placement(schedule, 2)
    stages, plain = build(placement, ps, tied, dropout, num_layers=FEW)
    plain.remove()
    shard = DataParallel(stages, ps, zero_stage=zero, bucket_size=300, overlap=True)
    executor = executor_of(stages, ps, schedule, policy, shard)
    mine = {k: v[ps.index("dp") * M :][:M] for k, v in batch(M * ps.size("dp")).items()}
    for _ in range(2):
        shard.zero_grad()
        executor.step_index = 0
        result = executor.step(mine, next_token_loss)
    assert not shard.unused()
    return whole_gradients(shard), result.loss.item(), norm(shard, result.num_tokens)


def compare(cases, **sizes):
    wrong = {}
    for case in cases:
        _, _, _, tied, dropout = case
        found = two_steps(case, **sizes)
        dp = state(pp=1 if case[1] == "none" else 2, **sizes).size("dp")
        want = one_process(dp, tied, "llama", dropout, False)
        told = differences(found, want)
        if found[0].keys() != want[0].keys():
            told.append(f"names {found[0].keys() ^ want[0].keys()}")
        if told:
            wrong[case] = told
    return wrong


MESHES = [  # data 2 beside tensor 2
    (zero, "none", "layer", tied, 0.0) for zero, tied in ((0, True), (1, False), (2, True), (3, True))
]


@pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.full), True])
def test_beside_tensor_ranks(ranks, sp):
    assert ranks(compare, MESHES, world=4, tp=2, sp=sp) == [{}] * 4


def check(ranks, cases, timeout=180.0):
    for world, mine in (2, [c for c in cases if c[1] == "none"]), (4, [c for c in cases if c[1] != "none"]):
        assert ranks(compare, mine, world=world, timeout=timeout) == [{}] * world


def test_a_cover_of_stages_and_schedules_equals_one_process(ranks):
    check(ranks, COVER)


@pytest.mark.parametrize("options", parts(list(itertools.product(*FACTORS[1:])), every=5))
@pytest.mark.parametrize("zero", ZERO)
def test_every_stage_and_schedule_equals_one_process(ranks, zero, options):
    check(ranks, [(zero, *values) for values in options if allowed((zero, *values))], 300.0)


@pytest.mark.parametrize("world", [1, 3, pytest.param(4, marks=pytest.mark.full)])
def test_any_number_of_ranks(ranks, world):
    cases = [(zero, "none", "none", True, 0.0) for zero in ZERO]
    assert ranks(compare, cases, world=world) == [{}] * world
