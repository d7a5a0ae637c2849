"""Latent attention on every layout: one process's loss, gradients and norm in float64; checkpoints of equal bytes."""

import pytest
import torch

from core import dist_checkpointing
from core.dist_checkpointing.state.mapping import sharded_state_dict
from core.models.gpt import GPTModel, moe_spec
from core.parallel_state.modules import named_parameters
from core.transformer.transformer_config import RotaryScaling
from tests.parity.pipelines import differences
from tests.parity.whole import whole_parameters
from tests.states import state
from tests.transformer.moe.layouts import VOCAB, S, config, reference, step
from tests.transformer.moe.test_checkpoints import identical

YARN = RotaryScaling(
    kind="yarn", factor=8.0, original_max_position_embeddings=8, beta_fast=2.0, mscale=0.7, mscale_all_dim=1.3
)
LATENT = {"multi_latent_attention": True, "num_query_groups": None, "kv_lora_rank": 6, "qk_head_dim": 6}
LATENT |= {"qk_pos_emb_head_dim": 4, "v_head_dim": 5, "qk_layernorm": True, "rotary_scaling": YARN}
DIRECT = LATENT | {"num_moe_experts": None}
DEEPSEEK = LATENT | {"q_lora_rank": 10, "rotary_interleaved": True, "router": "groups", "shared": True}
DEEPSEEK |= {"moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5}
DEEP = DEEPSEEK | {"layers": 4, "moe_layer_freq": (0, 1, 1, 1)}
DROPOUT = DIRECT | {"layers": 4, "dropout": 0.1}

CASES = [  # world, facts, layout
    (1, DEEPSEEK, {"recompute": "layer"}),
    (2, DEEPSEEK, {"tp": 2, "sp": True, "expert": 2, "zero": 2}),
    (2, DIRECT, {"tp": 2, "zero": 3, "recompute": "selective"}),
    (2, DEEP, {"pp": 2, "schedule": "zb-v", "recompute": "stage", "zero": 1}),
    (2, DEEPSEEK, {"cp": 2, "expert": 2, "zero": 1, "recompute": "layer"}),
    (2, DIRECT, {"cp": 2, "cp_comm_type": "p2p"}),
    (4, DEEP, {"tp": 2, "sp": True, "pp": 2, "schedule": "zb-v", "recompute": "layer", "zero": 3}),
]
FULL = [
    (2, DIRECT, {"cp": 2, "cp_comm_type": "a2a", "zero": 3}),
    (2, DROPOUT, {"pp": 2, "schedule": "zb-v", "recompute": "layer"}),
    (2, DROPOUT, {"zero": 3, "recompute": "layer"}),
    (4, DEEPSEEK, {"tp": 4, "sp": True, "recompute": "layer"}),
    (4, DEEPSEEK, {"cp": 2, "cp_comm_type": "p2p", "tp": 2, "sp": True, "expert": 4, "zero": 3}),
    (4, DEEP, {"pp": 4, "schedule": "zb-h1", "zero": 2}),
    (4, DEEP, {"pp": 2, "tp": 2, "expert": 2, "schedule": "interleaved-zb", "recompute": "selective"}),
    (4, DEEP, {"pp": 2, "cp": 2, "cp_comm_type": "a2a", "schedule": "1f1b", "recompute": "stage", "zero": 2}),
]
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)]


def compare(facts, layout):
    return differences(step(facts, **layout), reference(**facts)[:3])


@pytest.mark.parametrize("world, facts, layout", ALL, ids=str)
def test_a_step_is_one_process_s(ranks, world, facts, layout):
    told = ranks(compare, facts, layout, world=world)
    assert not any(told), told


STORED = DEEP | {"params_dtype": torch.float32, "num_moe_experts": 4}


def test_layouts_write_identical_files_and_read_each_other_s(ranks, tmp_path):
    identical(ranks, tmp_path, STORED, {2: [{"tp": 2, "sp": True}, {"pp": 2, "schedule": "zb-v", "zero": 2}]})


def written(folder):
    ps = state(tp=2)
    model = GPTModel(config(**DEEPSEEK), moe_spec(), VOCAB, S, parallel=ps, seed=4)
    dist_checkpointing.save({"model": sharded_state_dict(model, ps)}, folder, ps=ps)
    return whole_parameters(model, ps)


def read(folder):
    ps = state()
    model = GPTModel(config(**DEEPSEEK), moe_spec(), VOCAB, S, parallel=ps, seed=5)
    dist_checkpointing.load({"model": sharded_state_dict(model, ps)}, folder, ps=ps)
    return {name: p.detach() for name, p in named_parameters({0: model})}


def test_a_checkpoint_of_two_tensor_ranks_is_read_by_one(ranks, tmp_path):
    want = ranks(written, f"{tmp_path}/ckpt", world=2)[0]
    (found,) = ranks(read, f"{tmp_path}/ckpt", world=1)
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(found[name][tuple(map(slice, value.shape))], value), name
