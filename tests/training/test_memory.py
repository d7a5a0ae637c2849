"""The memory report: what it counts is what the formulas say, to the byte, and the first step is followed once."""

import re
from unittest.mock import patch

import pytest
import torch

from core.data_parallel import DataParallel
from core.models.gpt import gpt_stages
from core.optimizer import Offload, OptimizerConfig, adamw, build_optimizer
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule.schedules import placement
from core.training import ModelConfig, next_token_loss
from core.training.log.console import fitted
from core.training.log.memory import MemoryReport
from tests.states import state
from tests.twins.per_parameter import PerParameterGradSync

S, VOCAB, ROWS = 16, 101, 4
BUCKETS = 12  # at most, of the models below
SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48}


def batch():
    tokens = torch.randint(VOCAB, (ROWS, S), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def stages_on(ps, schedule=None, vocab=VOCAB, **more):
    model = ModelConfig(**SMALL | more)
    where = placement(schedule, ps.size("pp")) if schedule is not None else (0,)
    return gpt_stages(model.transformer(), model.spec(), vocab, S, placement=where, parallel=ps)


def run(stage, bf16, offload, optimizer="adamw"):
    """(said, usages, predicted) of one step on the ranks of this world."""
    ps, said = state(), []
    stages = stages_on(ps, bf16=bf16)
    report = MemoryReport(stages, ps, say=said.append)
    report.at("model init")
    shard = DataParallel(stages, ps, zero_stage=stage, bucket_size=4000)
    updates = build_optimizer(shard, OptimizerConfig(optimizer=optimizer), offload=offload)
    report.holds(shard, updates)
    report.at("optimizer init")
    predicted = report.predict(offload)
    executor = SingleStage(stages[0], ps=ps, num_microbatches=2, grad_sync=shard)
    report.watch(executor)
    for _ in range(2):
        result = executor.step(batch(), next_token_loss)
        updates.step(num_tokens=result.num_tokens)
        updates.zero_grad()
    assert "step" not in vars(executor), "the second step is as ever"
    report.at("second step")
    return said, report.usages, predicted


CASES = [(0, True, None), (1, False, Offload(fraction=0.5)), (2, True, None), (3, False, None)]
REST = [
    (stage, bf16, offload)
    for stage in range(4)
    for bf16 in (False, True)
    for offload in (None, Offload(), Offload(fraction=0.3))
    if (stage, bf16, offload) not in CASES
]


@pytest.mark.parametrize(
    "stage, bf16, offload", [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)]
)
def test_what_is_counted_is_what_the_formulas_say(ranks, stage, bf16, offload):
    said, usages, predicted = ranks(run, stage, bf16, offload, world=2)[0]
    for point in ("optimizer init", "second step"):
        for usage, formula in zip(usages[point], predicted, strict=True):
            assert usage.gradients == formula.gradients, point
            assert usage.host == formula.host, point
            # what is offloaded may leave nothing but a bucket's padding beside the weights, which has no states
            spare = 64 * 12 * BUCKETS if usage.host else 0
            assert 0 <= formula.optimizer - usage.optimizer <= spare, point
            assert usage.parameters == formula.weights, point
    whole = usages["model init"][0]
    assert whole.gradients == whole.optimizer == 0 and whole.parameters > 4 * 2 * (12 if bf16 else 24) * 32 * 32 / 4
    for usage, formula in zip(usages["first step"], predicted, strict=True):
        assert usage.gradients == formula.gradients, "p.grad, which is still there, has no memory of its own"
        assert usage.activations > usages["first forward"][0].activations > S * 32 * (2 if bf16 else 4)
    assert len({line.index("|") for line in said}) == 1 and len({len(line) for line in said}) == 1, "aligned"
    titles = [line.split("|")[0].strip() for line in said]
    assert titles == [
        "MiB per rank", "model init", "optimizer init", "predicted", "first forward", "first step", "second step",
    ]  # fmt: skip


def run_small(stage, optimizer):
    """`run` of 16 bits where parameters of 1000 elements are quantized already."""
    with patch.object(adamw, "LEAST_NUMEL", 1000):
        return run(stage, True, None, optimizer)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("optimizer, most", [("adamw8bit", 6.5), ("adafactor", 4.5)])
def test_states_that_are_smaller_are_counted_so(ranks, optimizer, most, stage):
    _, usages, predicted = ranks(run_small, stage, optimizer, world=2)[0]
    for point in ("optimizer init", "second step"):
        assert [usage.optimizer for usage in usages[point]] == [formula.optimizer for formula in predicted]
    # of a weight of 2 bytes; 12 would be AdamW's, a main weight of 4 is in it
    assert predicted[0].optimizer < most / 2 * predicted[0].weights / (1 + stage)


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_other_updates_have_other_states(ranks, optimizer):
    _, usages, predicted = ranks(run, 0, False, None, optimizer, world=1)[0]
    assert usages["optimizer init"][0].optimizer == predicted[0].optimizer
    one = predicted[0].weights
    assert predicted[0].optimizer == one if optimizer == "sgd" else one < predicted[0].optimizer < 2 * one


def on_a_pipeline(stage):
    ps, said = state(pp=2), []
    stages = stages_on(ps, "zb-v", 9000, num_layers=4)
    shard = DataParallel(stages, ps, zero_stage=stage)
    executor = Pipeline(stages, ps=ps, schedule="zb-v", num_microbatches=4, grad_sync=shard)
    report = MemoryReport(stages, ps, say=said.append)
    report.holds(shard)
    report.watch(executor)
    executor.step(batch(), next_token_loss)
    executor.close()
    return said, report.usages


@pytest.mark.parametrize("stage, world", [(1, 2), (3, 4)])
def test_on_a_pipeline_the_ranks_are_told_together(ranks, stage, world):
    (said, usages), *rest = ranks(on_a_pipeline, stage, world=world)
    others_said, others = rest[-1]
    assert said == others_said and usages == others
    first, *_, second = usages["first step"]
    assert first.parameters != second.parameters, "the first rank has the embedding"
    assert re.search(r"\d\.\d-\d\.\d", said[-1]), "so least and most are told"
    assert all(
        u.activations > v.activations > 0 for u, v in zip(usages["first step"], usages["first forward"], strict=True)
    )


def test_without_flat_buffers_gradients_are_counted_and_nothing_is_predicted(single):
    said = []
    stages = stages_on(single)
    PerParameterGradSync(stages, single)
    report = MemoryReport(stages, single, say=said.append)
    (usage,) = report.at("gradients")
    assert usage.gradients == usage.parameters and usage.optimizer == 0
    with pytest.raises(ValueError, match=r"of 1 DataParallel and its optimizer, 0 given; call holds"):
        report.predict()


def test_an_accelerator_is_asked_for_its_own_figures(monkeypatch, single):
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 3 * 2**20, raising=False)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: 5 * 2**20, raising=False)
    said, stages = [], stages_on(single)
    ps = ParallelState(single.config, device=torch.device("xpu"))
    (usage,) = MemoryReport(stages, ps, say=said.append).at("model init")
    assert (usage.allocated, usage.reserved) == (3 * 2**20, 5 * 2**20)
    cells = dict(zip(*([cell.strip() for cell in line.split("|")] for line in said), strict=True))
    assert (cells["allocated"], cells["reserved"]) == ("3.0", "5.0")
    assert list(cells)[-2:] == ["host", "buffers"], "what a narrow terminal leaves out first"
    on_cpu = []
    MemoryReport(stages, single, say=on_cpu.append).at("model init")
    assert len(fitted(on_cpu[0], 80)) <= 80 and " host" in fitted(on_cpu[0], 80)
