"""A layer with experts against code that nobody here wrote: transformers' layer and loss, torch's grouped product."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from core.autograd.grouped import _has_grouped_product, multiply_groups
from core.models.gpt import GPTModel, moe_spec
from core.parallel_state import ParallelState
from tests.models.huggingface import sigmoid_router
from tests.parity.whole import assert_same
from tests.transformer.moe.layouts import VOCAB, S, batch, config


def model(**facts):
    return GPTModel(config(**facts), moe_spec(), VOCAB, S, parallel=ParallelState.single("cpu"))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_layer_is_deepseek_v3s(monkeypatch, groups):
    """Sigmoid, groups, a bias that chooses, shared experts: outputs and every gradient, float64."""
    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3TopkRouter, "forward", sigmoid_router)
    h, f, experts = 16, 12, 8
    said = {"hidden_size": h, "moe_intermediate_size": f, "n_routed_experts": experts, "num_experts_per_tok": 3}
    said |= {"n_shared_experts": 2, "n_group": groups, "topk_group": max(1, groups // 2)}
    theirs_config = transformers.DeepseekV3Config(**said, routed_scaling_factor=1.5, norm_topk_prob=True)
    theirs_config._experts_implementation = "eager"  # their grouped product refuses float64
    theirs = modeling_deepseek_v3.DeepseekV3MoE(theirs_config).double()
    torch.manual_seed(0)
    for tensor in (*theirs.parameters(), theirs.gate.e_score_correction_bias):
        torch.nn.init.normal_(tensor, std=0.3)
    facts = {"num_moe_experts": experts, "moe_router_topk": 3, "moe_shared_expert_intermediate_size": 2 * f}
    facts |= {"moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 1.5}
    if groups > 1:
        facts |= {"moe_router_num_groups": groups, "moe_router_group_topk": groups // 2}
    ours = model(router="sigmoid", **facts).decoder.layers[0].mlp

    def in_our_form(tensors):
        shared = [tensors[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up")]
        return {
            "router.weight": tensors["gate.weight"],
            "experts.linear_fc1.weight": tensors["experts.gate_up_proj"].view(experts, 2, f, h),
            "experts.linear_fc2.weight": tensors["experts.down_proj"],
            "shared_experts.linear_fc1.weight": torch.stack(shared),
            "shared_experts.linear_fc2.weight": tensors["shared_experts.down_proj.weight"],
        }

    with torch.no_grad():
        weights = in_our_form(dict(theirs.named_parameters()))
        assert weights.keys() == dict(ours.named_parameters()).keys()
        for name, weight in ours.named_parameters():
            weight.copy_(weights[name].view_as(weight))
        ours.router.expert_bias.copy_(theirs.gate.e_score_correction_bias)
    theirs.gate.e_score_correction_bias.copy_(ours.router.expert_bias)  # rounded to float32
    x = torch.randn(9, 3, h, dtype=torch.float64, requires_grad=True)
    twin, gy = x.detach().clone().requires_grad_(), torch.randn(9, 3, h, dtype=torch.float64)
    y, want = ours(x), theirs(twin)
    y.backward(gy)
    want.backward(gy)
    found = {name: p.grad for name, p in ours.named_parameters()}
    expected = in_our_form({name: p.grad for name, p in theirs.named_parameters()})
    shaped = {name: gradient.view_as(found[name]) for name, gradient in expected.items()}
    assert_same(found | {"y": y.detach(), "x": x.grad}, shaped | {"y": want.detach(), "x": twin.grad})


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_auxiliary_loss_is_that_of_transformers_over_k(top_k):
    """Of one layer (theirs pools all layers), over the positions of a microbatch. They sum in float32."""
    alpha, data = 0.3, batch()
    facts = {"layers": 1, "moe_router_topk": top_k, "moe_router_pre_softmax": True, "balancing": "none"}
    plain, ours = model(**facts), model(**facts | {"balancing": "microbatch", "moe_z_loss_coeff": None})
    found = []
    plain.decoder.layers[0].mlp.router.register_forward_hook(lambda module, given, routing: found.append(routing))
    loss = plain(data["tokens"], labels=data["labels"]).sum()
    (routing,) = found
    aux = load_balancing_loss_func((routing.logits,), num_experts=4, top_k=top_k) / top_k
    names = dict(plain.named_parameters())
    want = torch.autograd.grad(loss + alpha * data["tokens"].numel() * aux, list(names.values()))
    ours(data["tokens"], labels=data["labels"]).sum().backward()
    assert_same({name: p.grad for name, p in ours.named_parameters()}, dict(zip(names, want, strict=True)), 1e-6)


COUNTS = [[16, 0, 32, 0], [0, 0, 0, 7], [1, 2, 3, 4], [0, 48, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS)
def test_products_are_torchs_grouped_ones_bit_for_bit(counts):
    """Forward, and the gradient of the input; float32 on CPUs."""
    x, weight = torch.randn(sum(counts), 32), torch.randn(4, 24, 32)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    y = multiply_groups(x, weight.transpose(1, 2), counts)
    assert torch.equal(y, F.grouped_mm(x, weight.transpose(1, 2), offs=ends))
    assert torch.equal(multiply_groups(y, weight, counts), F.grouped_mm(y, weight, offs=ends))


def test_the_probe_finds_what_a_grouped_product_can(monkeypatch):
    """Here it is right in float32 and unknown in float64; garbage behind an empty group is found."""
    _has_grouped_product.cache_clear()
    assert _has_grouped_product("cpu", torch.float32) and not _has_grouped_product("cpu", torch.float64)
    grouped_mm = F.grouped_mm

    def broken(x, matrices, offs):
        y = grouped_mm(x, matrices, offs=offs)
        y[int(offs[1]) :] = torch.nan
        return y

    monkeypatch.setattr(F, "grouped_mm", broken)
    _has_grouped_product.cache_clear()
    assert not _has_grouped_product("cpu", torch.float32)
    _has_grouped_product.cache_clear()
