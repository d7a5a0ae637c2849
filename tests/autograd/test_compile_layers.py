"""`compile_layers`: the gradients of eager layers, one graph for all layers, no break inside one, none made again."""

import os
import re
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from core.autograd import apply_recompute
from core.autograd.compiled import OLDEST_TORCH, check_compiler, check_torch, compile_layers
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, gpt_stages
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules as named
from core.testing import live_bytes
from core.training import next_token_loss
from core.training.log.memory import MemoryReport
from tests.marks import thinned
from tests.models.gpt import POSITIONS, VOCAB, config
from tests.parity import pipelines
from tests.parity.shards import whole_gradients
from tests.parity.whole import assert_same
from tests.states import state

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
TOO_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's own, of its own compiler
    pytest.mark.skipif(TOO_OLD, reason="refused: this torch's compiled layers give wrong gradients"),
]
LAYERS, MICROBATCHES = 2, 2


def batch(s):
    tokens, labels = torch.randint(VOCAB, (2, 4, s), generator=torch.Generator().manual_seed(s))
    return {"tokens": tokens, "labels": labels}


def built(ps, backend, *, zero=1, recompute="none", schedule="1f1b", style="llama", **facts):
    """(executor, optimizer, bucket owner), compiled with `backend`, None: as it is."""
    spec, made = pipelines.spec(style), config(style, num_layers=LAYERS * ps.size("pp"), **facts)
    if ps.size("pp") == 1:
        stages = {0: GPTModel(made, spec, VOCAB, POSITIONS, parallel=ps)}
    else:
        placement = named.placement(schedule, ps.size("pp"))
        stages = gpt_stages(made, spec, VOCAB, POSITIONS, placement=placement, parallel=ps)
    shard = DataParallel(stages if ps.size("pp") > 1 else stages[0], ps, zero_stage=zero)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=0.0))
    if backend is not None:
        for stage in stages.values():
            compile_layers(stage, backend=backend)
    common = {"ps": ps, "num_microbatches": MICROBATCHES, "grad_sync": shard, "seed": 3}
    if ps.size("pp") == 1:
        apply_recompute(stages[0], recompute, stage=stages[0].stage)
        return SingleStage(stages[0], **common), optimizer, shard
    return Pipeline(stages, schedule=schedule, recompute=recompute, **common), optimizer, shard


def gradients(executor, optimizer, shard, lengths):
    """Whole gradients of the last of several steps, of sequences of these lengths; and recompilations by step."""
    made, ps, found = [], shard.ps, None
    for number, length in enumerate(lengths):
        executor.step_index = 0
        optimizer.zero_grad()
        rows = {name: rows.chunk(ps.size("dp"))[ps.index("dp")] for name, rows in batch(length).items()}
        result = executor.step(rows, next_token_loss)
        if number == len(lengths) - 1:
            found = whole_gradients(shard)
        optimizer.step(num_tokens=result.num_tokens)
        made.append(counters["stats"]["unique_graphs"])
    return found, made


def compared(backend, tp=1, pp=1, sp=False, lengths=(8, 8), **facts):
    """Gradients of compiled layers are those of eager ones; what was compiled, and where graphs broke."""
    ps = state(tp=tp, pp=pp, sp=sp)
    executor, optimizer, shard = built(ps, None, **facts)
    expected, _ = gradients(executor, optimizer, shard, lengths[-1:])
    torch._dynamo.reset()
    counters.clear()
    counting = CompileCounterWithBackend(backend)
    executor, optimizer, shard = built(ps, counting, **facts)
    found, made = gradients(executor, optimizer, shard, lengths)
    assert_same(found, expected, 1e-10)
    breaks = {reason: count for reason, count in counters["graph_break"].items() if count}
    torch._dynamo.reset()
    return made, breaks, counting.frame_count


def test_layers_of_one_kind_are_one_graph_without_a_break():
    """One graph for all layers, microbatches and steps. The first change of the length makes it a variable; later
    ones are run by the same graph."""
    made, breaks, frames = compared("aot_eager", lengths=(8, 8, 6, 4, 8, 5))
    assert not breaks
    assert made == [1, 1, 2, 2, 2, 2] and frames == 2


CASES = [
    ({"zero": 3}, 2),
    ({"zero": 3, "recompute": "layer"}, 2),
    ({"tp": 2}, 2),
    ({"recompute": "selective"}, 1),
    ({"style": "gpt2", "dropout": 0.1}, 1),
    ({"zero": 2}, 2),
    ({"zero": 0}, 2),
    ({"pp": 2, "schedule": "zb-v", "recompute": "stage"}, 2),
    ({"pp": 2, "schedule": "zb-h1", "recompute": "layer", "zero": 2}, 4),
    ({"tp": 2, "sp": True, "zero": 3}, 4),
]
QUICK = 1  # the first one; the rest in full


@pytest.mark.parametrize(
    "facts, world",
    [*CASES[:QUICK], *thinned(CASES[QUICK:], every=2, marks=[pytest.mark.full])],
    ids=str,
)
def test_gradients_on_every_layout(ranks, facts, world):
    for made, breaks, frames in ranks(compared, "aot_eager", world=world, lengths=(8, 8, 8), **facts):
        assert made[1] == made[2] and frames >= 1
        if not {"tp", "dropout"} & facts.keys() and facts.get("recompute") != "selective":
            assert not breaks
        if "tp" in facts:
            # a linear with its collectives, and the sum of a gradient over the tensor ranks
            at_collectives = [
                re.search(r"`<function (_outside_compiled_graph|sum_gradient) at", reason) for reason in breaks
            ]
            assert breaks and all(at_collectives), breaks


@pytest.mark.full
def test_products_of_8_bits_are_between_graphs():
    made, breaks, _ = compared("aot_eager", lengths=(8, 8, 8), fp8="hybrid")
    assert made[1] == made[2] and breaks
    assert all("<function _outside_compiled_graph at" in reason for reason in breaks), breaks


@pytest.mark.full
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler found")
@pytest.mark.parametrize("facts, world", [({}, 1), ({"zero": 3, "recompute": "layer"}, 2), ({"tp": 2}, 2)], ids=str)
def test_inductor(ranks, facts, world):
    ranks(compared, "inductor", world=world, timeout=300, **facts)


class Breaks(nn.Module):
    """Somebody's layer, which asks for a value."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y if y.sum().item() > 1e9 else y.tanh()


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([kind(), kind()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_foreign_layer_that_is_no_graph_is_named():
    model, x = Stack(Breaks), torch.randn(2, 4)
    expected = model(x)
    handle = compile_layers(model, backend="aot_eager")
    assert handle.names == ["layers.0", "layers.1"]
    with pytest.raises(ValueError, match=r"layers.0, a Breaks, does not become 1 graph: .*compile_fallback=true"):
        model(x)
    assert torch.equal(model.eval()(x), expected), "eval mode runs what is written"
    handle.remove()
    compile_layers(model.train(), backend="aot_eager", may_break=True)
    torch.testing.assert_close(model(x), expected)
    handle.remove()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x).tanh()


def test_layers_of_a_graph_run_as_they_are_inside_of_a_dispatch_mode():
    """A counter of bytes or FLOPs; torch compiles nothing there, and refuses a forward that has to be one graph."""
    model, x = Stack(Plain), torch.randn(2, 4)
    expected = model(x)
    counting = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    handle = compile_layers(model, backend=counting)
    with live_bytes() as probe:
        assert torch.equal(model(x), expected)
    assert probe.peak > 0 and counting.frame_count == 0
    torch.testing.assert_close(model(x), expected)
    assert counting.frame_count
    handle.remove()
    torch._dynamo.reset()


def test_a_run_of_compiled_layers_does_not_look_into_its_first_step(single):
    """`core.pretrain --model.build X --training.compile layer`: its memory report stopped the first step."""
    model, said = Stack(Plain), []
    shard = DataParallel(model, single)
    counting = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    handle = compile_layers(model, backend=counting)
    executor = SingleStage(model, ps=single, num_microbatches=1, grad_sync=shard)
    report = MemoryReport({0: model}, single, say=said.append)
    report.watch(executor, compiled=True)
    executor.step({"x": torch.randn(2, 4)}, lambda output, batch: (output.square().sum(), torch.tensor(2)))
    assert counting.frame_count, "compiled in the first step"
    assert report.usages["first step"][0].activations is None
    cells = [cell.strip() for cell in said[-1].split("|")]
    assert cells[0] == "first step" and cells[4] == "-"
    handle.remove()
    torch._dynamo.reset()


def test_a_model_without_layers_and_a_machine_without_a_compiler(monkeypatch):
    with pytest.raises(ValueError, match="Linear has 0 layers"):
        compile_layers(nn.Linear(2, 2))
    monkeypatch.setattr("core.autograd.compiled.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs triton for device cuda"):
        check_compiler(torch.device("cuda"))
    monkeypatch.setenv("CXX", "no_such_compiler")
    without = inductor_config.patch({"cpp.cxx": (None, "no_such_compiler")})  # monkeypatch would take the entry away
    with without, pytest.raises(ValueError, match="needs a C"):
        check_compiler(torch.device("cpu"))


def test_a_torch_that_is_too_old_is_refused():
    with pytest.raises(ValueError, match=r"compile=layer needs torch 2\.12, this is 2\.11\.0\+cpu"):
        check_torch("2.11.0+cpu")
    for version in ("2.12.0", "2.13.0+cpu", "2.14.0a0+git1234", "3.0.1"):
        check_torch(version)
