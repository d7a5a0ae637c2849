"""Multi-head latent attention by itself: its rules, attention whose values have another size than keys, its FLOPs."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.autograd import apply_recompute
from core.context_parallel import begin_of_rows, visible_mask
from core.models.gpt import GPTModel, gpt2_config, gpt2_spec, llama_config, llama_spec
from core.models.gpt.description import described, description, description_of, differences
from core.models.lora import LoraConfig, apply_lora
from core.parallel_state import ParallelConfig, ParallelState
from core.transformer.attention.kv_cache import LayerCache
from core.transformer.attention.self_attention import CoreAttention
from core.transformer.flops import multiplications_per_token
from core.transformer.rules import check_layout
from core.transformer.spec import Build, StageContext
from core.transformer.transformer_config import RotaryConfig, RotaryScaling, TransformerConfig
from tests.context_parallel.rows import documents
from tests.transformer.test_kept_attention import Kernels

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 10}
LATENT |= {"qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 7}
YARN = RotaryScaling(kind="yarn", factor=40.0, original_max_position_embeddings=4096, mscale_all_dim=1.0)


def small(**more):
    return llama_config(**SIZES | LATENT | {"ffn_hidden_size": 48, "params_dtype": torch.float64} | more)


REFUSED = [
    ({"kv_lora_rank": 0}, "kv_lora_rank=0 must be at least 1"),
    ({"q_lora_rank": 0}, "q_lora_rank=0 must be at least 1"),
    ({"qk_pos_emb_head_dim": 5}, "qk_pos_emb_head_dim=5 is odd.*use 6"),
    ({"num_query_groups": 2}, "num_query_groups=2 with multi_latent_attention.*num_attention_heads=4 heads.*leave"),
    ({"kv_channels": 8}, r"kv_channels=8 .*qk_head_dim=6 \+ qk_pos_emb_head_dim=4 = 10; leave kv_channels out"),
    ({"rotary_percent": 0.5}, "rotary_percent=0.5 with multi_latent_attention.*qk_pos_emb_head_dim=4 of 10"),
    ({"rotary_per_layer": (None, RotaryConfig(percent=0.5))}, "rotary_percent=0.5 with multi_latent_attention"),
    ({"add_qkv_bias": True}, "add_qkv_bias=True with multi_latent_attention.*leave it out"),
    ({"latent_layernorm_epsilon": 0.0}, "latent_layernorm_epsilon=0.0 must be positive"),
    ({"multi_latent_attention": False}, "kv_lora_rank=10 without multi_latent_attention; set that too, or leave"),
]


@pytest.mark.parametrize("facts, message", REFUSED)
def test_what_contradicts_is_refused(facts, message):
    with pytest.raises(ValueError, match=message):
        small(**facts)


def test_interleaved_rotation_is_of_latent_attention():
    with pytest.raises(ValueError, match=r"rotary_interleaved=True without multi_latent_attention.*use False"):
        llama_config(**SIZES, rotary_interleaved=True)
    assert small(rotary_interleaved=True).rotary_interleaved


def test_sizes_that_are_not_given_are_megatrons():
    config = TransformerConfig(**SIZES, multi_latent_attention=True)
    assert (config.q_lora_rank, config.kv_lora_rank, config.v_head_dim) == (None, 512, 128)
    assert (config.head_size, config.rotary_size, config.value_size) == (192, 64, 128)
    assert replace(config, num_layers=3).kv_channels == 192
    with pytest.raises(ValueError, match="num_attention_heads=4 does not divide over tensor_model_parallel_size=3"):
        check_layout(config, ParallelConfig(tensor=3))


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"beta_fast": 1.0, "beta_slow": 2.0}, "beta_slow=2.0 must be positive, and at most beta_fast=1.0"),
        ({"mscale": -1.0}, "mscale=-1.0 must not be negative"),
        ({"attention_factor": 0.0}, "attention_factor=0.0 must be positive"),
        ({"mscale_all_dim": math.inf}, "mscale_all_dim=inf must not be negative, and finite"),
    ],
)
def test_scalings_that_cannot_be(scaling, message):
    with pytest.raises(ValueError, match=message):
        RotaryScaling(kind="yarn", factor=2.0, **scaling)


def test_what_yarn_multiplies():
    """DeepSeek-V3's numbers: tables as they are, scores by (0.1 ln 40 + 1)^2; with one mscale only, tables."""
    assert YARN.table_factor == 1.0
    assert YARN.score_factor == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    tables_only = replace(YARN, mscale_all_dim=0.0)
    assert (tables_only.table_factor, tables_only.score_factor) == (pytest.approx(0.1 * math.log(40) + 1), 1.0)
    assert replace(YARN, attention_factor=0.7).table_factor == 0.7
    assert small(rotary_scaling=YARN).score_scale(0) == 10**-0.5 * YARN.score_factor
    assert small(rotary_scaling=YARN, softmax_scale=0.3).score_scale(0) == 0.3
    by_layer = (None, RotaryConfig(scaling=YARN))
    scales = [small(rotary_per_layer=by_layer).score_scale(layer) for layer in (0, 1)]
    assert scales == [10**-0.5, 10**-0.5 * YARN.score_factor]


def core_attention(value_size, windows=None, dropout=0.0):
    config = small(v_head_dim=value_size, windows=windows, attention_dropout=dropout)
    return CoreAttention(Build(config, ParallelState.single("cpu"), StageContext(), layer=1))


def leaves(value_size, queries=12):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, queries, 10), (2, 4, 12, 10), (2, 4, 12, value_size))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def plainly(q, k, v, hidden, scale):
    scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("value_size", [3, 10, 17])
@pytest.mark.parametrize("how", ["causal", "window", "mask", "documents", "cached"])
def test_values_of_another_size_than_keys(value_size, how):
    """The output and gradients of softmax(q k^T / sqrt(d)) v in plain operations, whatever the size of v."""
    core = core_attention(value_size, windows=(None, 5) if how == "window" else None)
    queries = 4 if how == "cached" else 12
    hidden = torch.ones(queries, 12, dtype=torch.bool).triu(12 - queries + 1)
    attention_mask = None
    if how == "window":
        hidden = hidden | torch.ones(12, 12, dtype=torch.bool).tril(-5)
    if how == "mask":
        hidden = hidden[None, None] | (torch.arange(12) == 3) & (torch.arange(12)[:, None] > 3)
        attention_mask = hidden
    if how == "documents":
        begin = documents(12, ([4], [7, 9]))
        hidden = visible_mask(begin)
        attention_mask = begin_of_rows(begin, ParallelState.single("cpu"))
    ours, theirs = leaves(value_size, queries), leaves(value_size, queries)
    got, want = core(*ours, attention_mask), plainly(*theirs, hidden, 10**-0.5)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for out in (got, want):
        out.sin().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)


def test_a_cache_keeps_values_of_their_own_size():
    cache = LayerCache(4, None)
    k, v = torch.randn(1, 2, 3, 10), torch.randn(1, 2, 3, 7)
    cache.extend(k[:, :, :2], v[:, :, :2])
    keys, values, _ = cache.extend(k[:, :, 2:], v[:, :, 2:])
    assert torch.equal(keys, k) and torch.equal(values, v)


@pytest.mark.parametrize("q_rank", [None, 12])
def test_multiplications_are_those_of_the_matrices(q_rank):
    """Every weight of a layer's matrices meets every token once; keys and values by their own sizes."""
    config = small(q_lora_rank=q_rank)
    model = GPTModel(config, llama_spec(), 53, 64, parallel=ParallelState.single("cpu"))
    layers, _ = multiplications_per_token(config, 53, 64)
    layer = model.decoder.layers[0]
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    assert layers[0] == matrices + 64 // 2 * 4 * (10 + 7)


def step(policy):
    """(gradients, attention kernels) of a second step."""
    config = small(qk_layernorm=True, params_dtype=torch.float32)
    model = GPTModel(config, llama_spec(), 53, 24, parallel=ParallelState.single("cpu"), seed=1)
    apply_recompute(model, policy, stage=model.stage, keeps="attention")
    tokens = torch.randint(53, (2, 24), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model.zero_grad()
        with Kernels() as kernels:
            model(tokens, labels=tokens.roll(-1, 1)).sum().backward()
    return [p.grad for p in model.parameters()], (kernels.forward, kernels.backward)


def test_a_recomputed_layer_keeps_its_attention():
    plain, counts = step("none")
    kept, kernels = step("layer")
    assert kernels == (2, 2) == (counts[0], counts[0])
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))


def test_a_description_says_all_of_it():
    config = small(rotary_interleaved=True, rotary_scaling=YARN, latent_layernorm_epsilon=1e-6)
    model = GPTModel(config, llama_spec(), 53, 24, parallel=ParallelState.single("cpu"))
    assert described(description(model))["config"] == config


def test_what_an_older_version_did_not_say_is_no_difference():
    """A checkpoint of before yarn: its scaling has fewer numbers; a number that it has still counts."""
    scaling = RotaryScaling(kind="llama3", factor=8.0)
    config = llama_config(**SIZES, rotary_scaling=scaling, rotary_per_layer=(None, RotaryConfig(scaling=scaling)))
    now = description_of(config=config, transformer_layer_spec=llama_spec(), share_embeddings_and_output_weights=True)
    before = deepcopy(now)
    per_layer = before["config"]["rotary_per_layer"]
    for old in (before["config"]["rotary_scaling"], per_layer[1]["scaling"]):
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"):
            del old[name]
    assert differences(before, now) == []
    per_layer[1]["scaling"]["factor"] = 4.0
    assert [one.partition("=")[0] for one in differences(before, now)] == ["rotary_per_layer"]


def test_positions_may_be_learned_and_biases_are_of_the_output():
    config = gpt2_config(**SIZES | LATENT, add_bias_linear=True)
    model = GPTModel(config, gpt2_spec(), 53, 24, parallel=ParallelState.single("cpu"))
    attention = model.decoder.layers[0].self_attention
    biased = [name for name, p in attention.named_parameters() if name.endswith("bias")]
    assert biased == ["linear_proj.bias"]
    assert torch.isfinite(model(torch.randint(53, (1, 9)))).all()


def test_adapters_are_of_the_split_linears():
    model = GPTModel(small(), llama_spec(), 53, 24, parallel=ParallelState.single("cpu"))
    with pytest.raises(ValueError, match=r"'linear_qkv' is no linear of this model.*linear_kv_up_proj"):
        apply_lora(model, LoraConfig(rank=2, modules=("linear_qkv", "linear_proj")))
    named = ("linear_q_up_proj", "linear_kv_up_proj", "linear_proj")
    tokens = torch.randint(53, (1, 9))
    before = model(tokens)
    apply_lora(model, LoraConfig(rank=2, modules=named))
    assert torch.equal(model(tokens), before)
    model(tokens).sin().sum().backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert len(trained) == 2 * 3 * 2 and all(".adapter." in name for name in trained)


def test_adapters_without_modules_are_of_the_latents_too():
    model = GPTModel(small(), llama_spec(), 53, 24, parallel=ParallelState.single("cpu"))
    apply_lora(model, LoraConfig(rank=2))
    attention = ["linear_kv_up_proj", "linear_proj", "linear_q_up_proj"]
    assert sorted(model.lora.modules) == sorted(["linear_fc1", "linear_fc2", *attention])


class Ours(nn.Module):
    """A core attention of the user's own, which sees values of their own size."""

    def __init__(self, build):
        super().__init__()

    def forward(self, q, k, v, attention_mask=None):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_core_attention_of_ones_own():
    spec, parallel = replace(llama_spec(), core_attention=Ours), ParallelState.single("cpu")
    tokens = torch.randint(53, (1, 9))
    found = [GPTModel(small(), s, 53, 24, parallel=parallel, seed=2)(tokens) for s in (spec, llama_spec())]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
