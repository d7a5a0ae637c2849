"""A run's weights are drawn into the memory that keeps them: nothing is built twice, on any layout."""

from contextlib import nullcontext

import pytest
import torch

from core.data_parallel import DataParallel
from core.data_parallel.buffers import meta
from core.parallel_state import layout_of
from core.testing.live import LiveBytes
from core.training import RunConfig
from core.training.model.begin import begin
from tests.parity.whole import assembled
from tests.states import state

FIELDS = {
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "data.sequence_length": 16,
    "training.global_batch_size": 8,
    "device": "cpu",
}


def built(zero, layout, schedule, on_meta, layers=32, probed=True):
    """(peak of construction over what is kept, whole weights on rank 0)."""
    ps, probe = state(**layout), LiveBytes()
    run = RunConfig.from_dict(FIELDS | {"pipeline.schedule": schedule, "model.num_layers": layers})
    with probe if on_meta and probed else nullcontext():
        stages = begin(run, 64, ps, may_be_on_meta=on_meta)
        shard = DataParallel(stages, ps, zero_stage=zero)
    kept = sum(t.untyped_storage().nbytes() for b in shard.buffers for t in (b.weights, b.gradients))
    peak = probe.peak
    shard.wait()
    for stage in stages.values():
        shard.unshard(stage)
    parameters = {name: p.detach().clone() for stage in stages.values() for name, p in stage.named_parameters()}
    layouts = {name: layout_of(p) for stage in stages.values() for name, p in stage.named_parameters()}
    return peak / kept, assembled(parameters, layouts, ps)


# a layer is made before it is kept: a rank needs enough of them for one to be less than a twentieth
CASES = [
    pytest.param(2, 3, {}, "1f1b", 32, id="zero3-dp2", marks=pytest.mark.full),
    pytest.param(1, 0, {}, "1f1b", 32, id="dense", marks=pytest.mark.full),
    pytest.param(4, 1, {"tp": 2, "pp": 2}, "zb-v", 56, id="zero1-tp2-pp2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "zero", "layout", "schedule", "layers"), CASES)
def test_construction_holds_what_is_kept(ranks, world, zero, layout, schedule, layers):
    eager = ranks(built, zero, layout, schedule, False, layers, world=world, timeout=240)
    for (ratio, found), (_, expected) in zip(
        ranks(built, zero, layout, schedule, True, layers, world=world, timeout=240), eager, strict=True
    ):
        assert 0.9 <= ratio <= 1.05, ratio
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("layout", "schedule"), [({"tp": 2}, "1f1b"), ({"pp": 2}, "1f1b")], ids=str)
def test_the_weights_are_those_of_a_model_built_on_the_device(ranks, layout, schedule):
    eager = ranks(built, 1, layout, schedule, False, 4, probed=False)
    for (_, found), (_, expected) in zip(
        ranks(built, 1, layout, schedule, True, 4, probed=False), eager, strict=True
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_model_on_meta_is_drawn_where_its_configuration_says(monkeypatch, on_cpu):
    ps, asked = state(), set()
    real = meta.fill
    monkeypatch.setattr(meta, "fill", lambda *a, draw_on_cpu, **how: asked.add(draw_on_cpu) or real(*a, **how))
    run = RunConfig.from_dict(FIELDS | {"model.num_layers": 1, "model.use_cpu_initialization": on_cpu})
    DataParallel(begin(run, 64, ps, may_be_on_meta=True), ps)
    assert asked == {on_cpu}
