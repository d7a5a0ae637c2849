"""Experts in a checkpoint: identical files from every layout, which each loads; also where some layers have none."""

import json
from dataclasses import replace

import pytest
import torch

from core import dist_checkpointing
from core.data_parallel import DataParallel
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.tools import export
from core.models.gpt import GPTModel, gpt_stages, moe_spec
from core.models.gpt.stages import split_layers
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelState
from core.parallel_state.modules import named_buffers
from core.pipeline.schedule import schedules as named
from core.transformer.flops import multiplications_per_token
from core.transformer.mlp import MLP
from tests.parity.test_checkpoint import digest, whole
from tests.parity.test_sharded_checkpoint import fill, same, snapshot, whole_state
from tests.states import state
from tests.transformer.moe.layouts import VOCAB, S, config

MIXED = {"layers": 4, "moe_layer_freq": [0, 1, 1, 1], "shared": True, "params_dtype": torch.float32}
MIXED |= {"moe_router_enable_expert_bias": True, "balancing": "global"}
PLAIN = {"layers": 4, "params_dtype": torch.float32}
# layouts of up to four ranks; a stage of the pipeline may have no experts, or nothing else
TWO = [{"expert": 2, "zero": 1}, {"tp": 2, "expert": 2, "sp": True}, {"pp": 2, "schedule": "zb-v", "zero": 2}]
FOUR = [{"expert": 4, "zero": 3}, {"tp": 2, "expert": 4, "zero": 2}, {"pp": 2, "expert": 2, "schedule": "1f1b"}]
MORE = [{"tp": 2, "expert": 2, "zero": 3}, {"pp": 4, "schedule": "1f1b"}, {"pp": 2, "tp": 2, "expert": 2, "zero": 1}]


def held(facts, zero=0, schedule="1f1b", **layout):
    """(shard, optimizer) of this rank, with values by name and place."""
    ps = state(**layout)
    placement = named.placement(schedule, ps.size("pp"))
    stages = gpt_stages(config(**facts), moe_spec(), VOCAB, S, parallel=ps, placement=placement)
    shard = DataParallel(stages, ps, zero_stage=zero, bucket_size=3000)
    optimizer = ShardedAdamW(shard, OptimizerConfig())
    fill(shard, optimizer, empty=False)
    for name, buffer in counted(shard).items():
        buffer.copy_(whole(name, "buffer", buffer.shape))
    return shard, optimizer


def counted(shard):
    """The biases and counts of this rank's routers."""
    return {name: buffer for name, buffer in named_buffers(shard.module) if ".router." in name}


def round_trip(facts, layouts, folder):
    for number, layout in enumerate(layouts):
        shard, optimizer = held(facts, **layout)
        want = snapshot(shard, optimizer)
        at = f"{folder}/{shard.ps.sizes}-{number}"
        dist_checkpointing.save(whole_state(shard, optimizer), at, ps=shard.ps)
        fill(shard, optimizer, empty=True)
        for buffer in counted(shard).values():
            buffer.zero_()
        loaded = dist_checkpointing.load(whole_state(shard, optimizer), f"{folder}/first", ps=shard.ps)
        optimizer.load_state_dict(loaded["optimizer"])
        shard.wait()
        same(snapshot(shard, optimizer), want)
        for name, buffer in counted(shard).items():
            assert torch.equal(buffer, whole(name, "buffer", buffer.shape)), name


def saved(facts, folder):
    shard, optimizer = held(facts)
    dist_checkpointing.save(whole_state(shard, optimizer), folder, ps=shard.ps)


def identical(ranks, tmp_path, facts, worlds):
    ranks(saved, facts, f"{tmp_path}/first", world=1)
    for world, layouts in worlds.items():
        ranks(round_trip, facts, layouts, f"{tmp_path}", world=world, timeout=300)
    digests = {path.name: digest(path) for path in tmp_path.iterdir()}
    assert len(digests) == 1 + sum(map(len, worlds.values()))
    assert len(set(digests.values())) == 1, digests


def test_layers_of_two_kinds_write_identical_files(ranks, tmp_path):
    identical(ranks, tmp_path, MIXED, {2: TWO[1:], 4: FOUR[2:]})


@pytest.mark.full
@pytest.mark.parametrize("facts", [MIXED, PLAIN], ids=["mixed", "plain"])
def test_all_layouts_write_identical_files(ranks, tmp_path, facts):
    identical(ranks, tmp_path, facts, {2: TWO, 4: FOUR + MORE})


def test_tools_know_which_layers_the_rows_are(tmp_path, capsys):
    """Row 0 of the experts is layer 1: in `inspect`, `export`, and per rank of tensor and pipeline ranks."""
    saved(MIXED, f"{tmp_path}/mixed")
    assert main(["inspect", "--json", f"{tmp_path}/mixed"]) == 0
    arrays = json.loads(capsys.readouterr().out)["arrays"]
    experts, dense = arrays["model/decoder.layers.mlp.experts.linear_fc1.weight"], "model/decoder.layers.mlp.linear"
    assert (experts["layers"], experts["shape"]) == ([1, 2, 3], [3, 4, 2, 12, 16])
    assert (experts["tp_dim"], experts["axis"]) == (1, "ep")
    assert (arrays[f"{dense}_fc1.weight"]["layers"], arrays[f"{dense}_fc1.weight"]["axis"]) == ([0], "tp")
    assert arrays["model/decoder.layers.input_layernorm.weight"]["layers"] == [0, 1, 2, 3]
    assert main(["inspect", f"{tmp_path}/mixed"]) == 0
    assert "experts.linear_fc1.weight (layers [1, 2, 3])" in capsys.readouterr().out

    model = GPTModel(config(**MIXED), moe_spec(), VOCAB, S, parallel=ParallelState.single("cpu"))
    stored = StoredCheckpoint.open(f"{tmp_path}/mixed")
    shapes = {tensor.name: tensor.shape for tensor in export.tensors(stored)}
    true = {name: p.parallel_layout.shape for name, p in model.named_parameters()}
    true |= {name: tuple(buffer.shape) for name, buffer in named_buffers(model)}
    assert shapes == true
    by_stage = [{t.name: t.shape for t in export.tensors(stored, tp=(1, 2), pp=(stage, 2))} for stage in (0, 1)]
    assert by_stage[0].keys() | by_stage[1].keys() == true.keys() and not by_stage[0].keys() & by_stage[1].keys()
    assert {name.split(".")[2] for name in by_stage[0] if "layers" in name} == {"0", "1"}
    fc1 = "decoder.layers.1.mlp.experts.linear_fc1.weight"
    assert by_stage[0][fc1] == true[fc1], "tensor ranks hold whole experts"


def test_rows_of_other_layers_are_not_loaded(tmp_path):
    """The same shapes, other layers: refused with both, before anything is written."""
    saved(MIXED, f"{tmp_path}/mixed")
    other, optimizer = held({**MIXED, "moe_layer_freq": [1, 0, 1, 1]})
    with pytest.raises(ValueError, match=r"it is of the layers 1, 2, 3 in the checkpoint and 0, 2, 3 here"):
        dist_checkpointing.load(whole_state(other, optimizer), f"{tmp_path}/mixed", ps=other.ps)


def test_one_name_in_both_kinds_of_layers_is_refused():
    """A part of a user's own that is the same everywhere, in a model whose configuration says that layers differ."""
    spec = replace(moe_spec(), mlp=MLP)
    with pytest.raises(ValueError, match=r"layers 0 and 3 both have mlp.linear_fc1.weight, .* other names"):
        GPTModel(config(**MIXED), spec, VOCAB, S, parallel=ParallelState.single("cpu"))
    alike = config(**PLAIN, num_moe_experts=None)
    GPTModel(alike, spec, VOCAB, S, parallel=ParallelState.single("cpu"))


def test_a_stage_costs_what_its_kinds_of_layers_do():
    """Wide dense layers first: fewer of them on a stage; FLOPs count the experts that a token uses."""
    facts = config(**{**MIXED, "moe_layer_freq": (0, 0, 1, 1)}, ffn_hidden_size=400)
    layers, _ = multiplications_per_token(facts, VOCAB, S)
    attention, h = layers[0] - 3 * 16 * 400, 16
    assert layers[2] == layers[3] == attention + h * ((2 * 12 + 8) * 3 + 4)  # 2 of 4 experts, shared ones, the router
    assert [len(part) for part in split_layers(facts, VOCAB, S, 2)] == [1, 3]
