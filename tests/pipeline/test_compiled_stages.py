"""Layers compiled inside stages: the same gradients under every schedule as eager code in one process."""

import itertools
import shutil
from functools import cache

import pytest
import torch

from core.models.gpt import GPTModel, gpt_stages, llama_spec
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules as named
from core.training import next_token_loss
from tests.marks import thinned
from tests.models.gpt import POSITIONS, VOCAB, batch, config
from tests.parity.whole import assert_same
from tests.states import state

MICROBATCHES = 3


@cache
def reference():
    ps = ParallelState.single("cpu")
    model = GPTModel(config("llama", num_layers=4), llama_spec(), VOCAB, POSITIONS, parallel=ps)
    tokens, labels = batch(b=MICROBATCHES)
    SingleStage(model, ps=ps, num_microbatches=MICROBATCHES).step(
        {"tokens": tokens, "labels": labels}, next_token_loss
    )
    return {n: p.grad for n, p in model.named_parameters()}


def compiled(schedule, recompute, backend):
    ps = state(pp=2)
    stages = gpt_stages(
        config("llama", num_layers=4),
        llama_spec(),
        VOCAB,
        POSITIONS,
        placement=named.placement(schedule, 2),
        parallel=ps,
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for stage in stages.values():
        for layer in stage.decoder.layers.values():
            layer.compile(backend=backend)
    pipeline = Pipeline(stages, ps=ps, schedule=schedule, num_microbatches=MICROBATCHES, recompute=recompute)
    tokens, labels = batch(b=MICROBATCHES)
    for _ in range(2):  # a compiled graph is called again with another bag
        for stage in stages.values():
            stage.zero_grad()
        pipeline.step({"tokens": tokens, "labels": labels}, next_token_loss)
    for stage in stages.values():
        assert_same(
            {n: p.grad for n, p in stage.named_parameters()}, {n: reference()[n] for n, _ in stage.named_parameters()}
        )
    pipeline.close()
    if recompute == "layer":  # a region around a layer runs between graphs
        return
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] <= 3, "layers share graphs: with gradients, without, of the first input"


@pytest.mark.parametrize(
    "schedule, recompute", [pytest.param("1f1b", "none", marks=pytest.mark.full), ("zb-v", "stage")]
)
def test_compiled_layers_inside_stages(ranks, schedule, recompute):
    ranks(compiled, schedule, recompute, "aot_eager", world=2)


@pytest.mark.full
@pytest.mark.parametrize(
    "schedule, recompute", thinned(list(itertools.product(named.NAMED, ["none", "layer", "stage"])), every=7)
)
def test_every_schedule_with_compiled_layers(ranks, schedule, recompute):
    ranks(compiled, schedule, recompute, "aot_eager", world=2)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("schedule, recompute", [("1f1b", "none"), ("zb-v", "stage")])
def test_inductor(ranks, schedule, recompute):
    ranks(compiled, schedule, recompute, "inductor", world=2, timeout=300)
