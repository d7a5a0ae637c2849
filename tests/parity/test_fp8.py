"""8-bit products on every layout: one process's loss, gradients and norm, since scales are powers of two."""

import pytest
import torch

from core import dist_checkpointing
from core.autograd import fp8 as products
from core.dist_checkpointing.state.mapping import sharded_state_dict
from core.models.gpt import GPTModel, moe_spec
from core.parallel_state.modules import named_parameters
from tests.parity.pipelines import differences
from tests.parity.whole import whole_parameters
from tests.states import state
from tests.transformer.moe.layouts import VOCAB, S, config, reference, step

DENSE = {"num_moe_experts": None, "fp8": "hybrid"}
ROWS = DENSE | {"fp8_recipe": "rowwise"}
DEEP = DENSE | {"layers": 4}
ENDS = DEEP | {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2, "fp8_wgrad": False}
EXPERTS = {"fp8": "hybrid", "shared": True}
LATENT = DENSE | {"multi_latent_attention": True, "num_query_groups": None, "q_lora_rank": 10, "kv_lora_rank": 6}
LATENT |= {"qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5}

CASES = [  # world, facts, layout
    (1, ROWS, {"recompute": "layer"}),
    (1, DEEP, {"schedule": "zb-h1", "recompute": "layer"}),
    (2, DENSE, {"zero": 3, "recompute": "layer"}),
    (2, ROWS, {"tp": 2, "sp": True, "zero": 1}),
    (2, LATENT, {"tp": 2, "sp": True, "recompute": "selective"}),
    (2, DENSE, {"cp": 2, "zero": 1}),
    (2, EXPERTS, {"tp": 2, "sp": True, "expert": 2, "zero": 2}),
    (2, DEEP, {"pp": 2, "schedule": "zb-h1", "recompute": "layer", "zero": 1}),
    (2, ENDS, {"pp": 2, "schedule": "zb-v", "recompute": "stage"}),
    (4, DEEP, {"pp": 2, "tp": 2, "sp": True, "schedule": "zb-h1", "recompute": "layer", "zero": 3}),
]


def compare(facts, layout, tolerance=1e-10):
    return differences(step(facts, **layout), reference(**facts)[:3], tolerance)


@pytest.mark.parametrize("world, facts, layout", CASES, ids=str)
def test_a_step_is_one_process_s(ranks, world, facts, layout):
    told = ranks(compare, facts, layout, world=world)
    assert not any(told), told


def test_of_e4m3_gradients_only_the_smallest_differ(ranks):
    """Numbers below 2^-15 of a part's largest lose digits (e5m2: 2^-29), and parts have other largest values."""
    told = ranks(compare, EXPERTS | {"fp8": "e4m3"}, {"tp": 2, "sp": True, "expert": 2}, 1e-5, world=2)
    assert not any(told), told


def scales_as_they_come(facts, layout):
    """The same where a scale is 448 / amax itself: the mutant that the cases above would see."""
    before = products._FLOAT32_EXPONENT
    products._FLOAT32_EXPONENT = 0x7FFFFFFF
    try:
        return compare(facts, layout)
    finally:
        products._FLOAT32_EXPONENT = before


def test_scales_that_are_no_powers_of_two_differ_by_layout(ranks):
    told = ranks(scales_as_they_come, DENSE, {"tp": 2}, world=2)
    assert any("error" in line for line in told[0])


@pytest.mark.parametrize("facts", [DENSE, ROWS, EXPERTS, LATENT], ids=str)
def test_losses_and_gradients_are_near_those_without(facts):
    # larger weights amplify any noise: 2.6 % on x and W changes gradients by half of themselves
    facts = facts | {"init_method_std": 0.1}
    plain = {name: value for name, value in facts.items() if not name.startswith("fp8")}
    torch.manual_seed(0)
    with_it, without = reference(**facts), reference(**plain)
    assert 0 < abs(with_it[1] - without[1]) < 0.02 * without[1]
    for name, gradient in without[0].items():
        error = (with_it[0][name] - gradient).norm() / gradient.norm()
        assert 1e-4 < error < 0.25, (name, error)


def test_which_linears_have_it():
    """Not embedding, output layer, router; at the ends of the model as many layers as were left out."""
    facts = {"layers": 5, "shared": True, "fp8": "e4m3", "first_last_layers_bf16": True}
    model = GPTModel(config(**facts, num_layers_at_end_in_bf16=2), moe_spec(), VOCAB, S)
    named = {name for name, part in model.named_modules() if getattr(part, "fp8", None) is not None}
    parts = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.experts")
    parts += ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
    assert named == {f"decoder.layers.{layer}.{part}" for layer in (1, 2) for part in parts}


def written(folder):
    ps = state(tp=2)
    model = GPTModel(config(**ROWS), moe_spec(), VOCAB, S, parallel=ps, seed=4)
    dist_checkpointing.save({"model": sharded_state_dict(model, ps)}, folder, ps=ps)
    return whole_parameters(model, ps)


def read(folder):
    ps = state()
    model = GPTModel(config(num_moe_experts=None), moe_spec(), VOCAB, S, parallel=ps, seed=5)
    dist_checkpointing.load({"model": sharded_state_dict(model, ps)}, folder, ps=ps)
    return {name: p.detach() for name, p in named_parameters({0: model})}


def test_a_checkpoint_is_read_by_a_model_without(ranks, tmp_path):
    want = ranks(written, f"{tmp_path}/ckpt", world=2)[0]
    (found,) = ranks(read, f"{tmp_path}/ckpt", world=1)
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(found[name][tuple(map(slice, value.shape))], value), name
