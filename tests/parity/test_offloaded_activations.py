"""Offloaded activations under every schedule, recomputation, ZeRO stage and tensor size: one process's gradients."""

import itertools
from unittest.mock import patch

import pytest

from core.autograd import NullGradSync, apply_recompute, offload, offload_activations
from core.autograd.offload import is_offloaded
from core.autograd.proxy import proxies_of
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel
from core.parallel_state import ParallelState
from core.pipeline.schedule import schedules as named
from core.testing import live_bytes
from core.training import PipelineConfig, TrainingConfig, next_token_loss
from core.training.run.build import build_executor
from tests.marks import parts
from tests.parity.pipelines import VOCAB, S, batch, build, config, differences, spec
from tests.parity.shards import norm, whole_gradients
from tests.parity.test_data_parallel import executor_of
from tests.parity.test_pipeline_meshes import FEW, M, one_process
from tests.states import state
from tests.transformer.moe import layouts as moe

# zero_stage, schedule, recompute, fraction, tp, sequence parallel
TWO = [
    (3, "none", "none", 1.0, 1, False),
    (1, "none", "layer", 0.5, 2, True),
    (1, "zb-v", "selective", 1.0, 1, False),
]
FOUR = [(2, "1f1b", "none", 0.5, 1, False), (3, "none", "selective", 1.0, 2, True)]
ALL = [
    (zero, schedule, policy, 1.0, tp, tp > 1)
    for zero, schedule, policy, tp in itertools.product(
        (0, 3), ("none", "1f1b", "zb-v", "interleaved-zb"), ("none", "selective", "layer"), (1, 2)
    )
]


def one_case(case):
    """What differs of the second of two equal steps from one process; and what waited on the host meanwhile."""
    zero, schedule, policy, fraction, tp, sp = case
    ps = state(pp=1 if schedule == "none" else 2, tp=tp, sp=sp)
    placement = (0,) if schedule == "none" else named.placement(schedule, 2)
    dropout = 0.1 if tp == 1 else 0.0  # masks are of whole heads
    stages, plain = build(placement, ps, False, dropout, num_layers=FEW)
    plain.remove()
    shard = DataParallel(stages, ps, zero_stage=zero, bucket_size=300, overlap=True)
    executor = executor_of(stages, ps, schedule, policy, shard)
    handle = offload_activations(stages, fraction)
    copies, waited = handle._copies, []
    store = copies.store
    copies.store = lambda tensor: waited.append(tensor.nbytes) or store(tensor)
    mine = {k: v[ps.index("dp") * M :][:M] for k, v in batch(M * ps.size("dp")).items()}
    for _ in range(2):
        executor.step_index = 0
        shard.zero_grad()
        result = executor.step(mine, next_token_loss)
    found = whole_gradients(shard), result.loss.item(), norm(shard, result.num_tokens)
    left = handle.host_bytes
    if schedule != "none":
        executor.close()
    told = differences(found, one_process(ps.size("dp"), False, "llama", dropout, False))
    return told, sum(waited) > 0, left, len(handle.names)


def check(cases):
    for case in cases:
        with patch.object(offload, "LEAST_BYTES", 9):
            told, has_waited, left, layers = one_case(case)
        assert not told, (case, told)
        assert has_waited and left == 0 and layers, case


@pytest.mark.parametrize("cases, world", [(TWO, 2), pytest.param(FOUR, 4, marks=pytest.mark.full)])
def test_gradients_are_those_of_one_process(ranks, cases, world):
    ranks(check, cases, world=world)


@pytest.mark.parametrize("product", parts(ALL, every=5))
def test_the_product_equals_one_process(ranks, product):
    for world in (2, 4):
        cases = [case for case in product if (1 if case[1] == "none" else 2) * case[4] <= world]
        ranks(check, cases, world=world, timeout=400)


EXPERTS = [
    ({"balancing": "sequence", "shared": True}, {"expert": 2, "zero": 1}),
    ({"router": "sigmoid", "balancing": "microbatch"}, {"expert": 2, "zero": 3, "recompute": "layer"}),
    ({"balancing": "microbatch"}, {"cp": 2, "zero": 2}),
]


def experts(cases):
    for facts, layout in cases:
        policy = {"schedule": "none", "recompute": "none"}
        stages, shard, executor, mine = moe.on_layout(facts, **policy | layout)
        handle = offload_activations(stages)
        shard.zero_grad()
        with patch.object(offload, "LEAST_BYTES", 9):
            result = executor.step(mine, next_token_loss)
        found = whole_gradients(shard), result.loss.item(), norm(shard, result.num_tokens)
        assert not differences(found, moe.reference(**facts)[:3]) and handle.host_bytes == 0, (facts, layout)


@pytest.mark.full
def test_experts_and_context_ranks(ranks):
    ranks(experts, EXPERTS, world=2)


def built():
    """A run's executor offloads the first half of each stage's layers, around the recomputed ones."""
    for pp, schedule in ((1, "none"), (2, "zb-v")):
        ps = state(pp=pp)
        placement = (0,) if pp == 1 else named.placement(schedule, 2)
        stages, plain = build(placement, ps, num_layers=8)
        plain.remove()
        training = TrainingConfig(offload_activations=0.5, recompute="layer", global_batch_size=4, micro_batch_size=1)
        executor = build_executor(stages, PipelineConfig(schedule="zb-v"), training, ps, NullGradSync())
        found = [[is_offloaded(layer) for layer in stage.decoder.layers.values()] for stage in stages.values()]
        assert found == ([[True] * 4 + [False] * 4] if pp == 1 else [[True, False]] * 2)
        for stage in stages.values():
            proxies = list(proxies_of(next(iter(stage.decoder.layers.values()))))
            assert [proxy.moves_saved for proxy in proxies] == [True, False], "the offload is around"
        if pp == 2:
            executor.close()


def test_a_run_offloads_the_share_that_it_was_told(ranks):
    ranks(built, world=2)


@pytest.mark.parametrize(
    "policy, keeps, least",
    [("none", "nothing", 0.8), ("selective", "nothing", 0.8), ("layer", "nothing", 0.4), ("layer", "attention", 0.6)],
)
def test_what_a_transformers_layers_keep_falls_by_what_waits_on_the_host(policy, keeps, least):
    """Of all that a forward leaves behind; outside of layers there are the logits and the embedding's result."""
    data, kept = batch(4), {}
    for fraction in (0.0, 0.5, 1.0):
        model = GPTModel(config(), spec(), VOCAB, S, parallel=ParallelState.single("cpu"))
        apply_recompute(model, policy, stage=model.stage, keeps=keeps)
        handle = offload_activations(model, fraction)
        for _ in range(2):  # the first run of a region is watched, and keeps more
            with live_bytes(ignore=[*model.parameters(), *data.values()]) as probe:
                loss = model(data["tokens"], labels=data["labels"]).sum()
                kept[fraction] = probe.live - handle.host_bytes
                on_host = handle.host_bytes
                loss.backward()
        assert (on_host > 0) == (fraction > 0)
    assert kept[1.0] < kept[0.5] < kept[0.0]
    assert 1 - kept[1.0] / kept[0.0] > least, kept
