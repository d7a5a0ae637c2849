"""Configurations of today's families, and their models in float64: the oracle of the tests."""

import math

import torch
import transformers
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.smollm3 import modeling_smollm3

from tests.models.test_huggingface import COMMON, in_float64

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e2}
LLAMA3 |= {"original_max_position_embeddings": 16}
PHI3 = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
NO_PADDING = {"pad_token_id": None}  # whose row of the embedding gets no gradient there
SLIDES = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
DEEP = COMMON | {"num_hidden_layers": 4}  # one for each stage of a V over 2 ranks
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "pad_token_id": None}
GEMMA3 = DEEP | {"head_dim": 6, "query_pre_attn_scalar": 11, "sliding_window": 5}
GLM = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "pad_token_id": None}
GLM |= {"n_shared_experts": 2, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "head_dim": 8}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 8.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 2.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.3}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 4}
LATENT |= {"num_key_value_heads": 8, "pad_token_id": None, "moe_intermediate_size": 20, "n_routed_experts": 8}
LATENT |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
TODAY = {
    "llama3": lambda: transformers.LlamaConfig(**COMMON, rope_parameters=dict(LLAMA3)),
    "linear": lambda: transformers.LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=5, head_dim=6),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, **SLIDES),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, **SLIDES, head_dim=12),
    "phi3": lambda: transformers.Phi3Config(
        **COMMON, pad_token_id=None, sliding_window=7, rope_parameters=dict(PHI3)
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GEMMA3, **NO_PADDING, layer_types=LOCAL_AND_GLOBAL),
    "gemma3-scaled": lambda: transformers.Gemma3TextConfig(
        **GEMMA3,
        **NO_PADDING,
        layer_types=LOCAL_AND_GLOBAL,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 7e3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, head_dim=6),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**COMMON, **EXPERTS, norm_topk_prob=True, head_dim=6),
    "qwen3_moe-not-normalized": lambda: transformers.Qwen3MoeConfig(**COMMON, **EXPERTS),
    "qwen3_moe-mixed": lambda: transformers.Qwen3MoeConfig(
        **DEEP, **EXPERTS, norm_topk_prob=True, head_dim=6, mlp_only_layers=[0], decoder_sparse_step=1
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**DEEP, **GLM, n_group=2, topk_group=1, use_qk_norm=True),
    "glm4_moe-biased": lambda: transformers.Glm4MoeConfig(
        **COMMON, **GLM | {"first_k_dense_replace": 0}, attention_bias=True
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **DEEP | LATENT, n_group=4, topk_group=2, rope_parameters=dict(YARN)
    ),
    "deepseek_v3-halves": lambda: transformers.DeepseekV3Config(
        **COMMON | LATENT | {"q_lora_rank": None, "v_head_dim": 16}, n_group=1, topk_group=1, rope_interleave=False
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **DEEP | LATENT,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek_v2-lite": lambda: transformers.DeepseekV2Config(**COMMON | LATENT | {"q_lora_rank": None}),
    "olmo2": lambda: transformers.Olmo2Config(**DEEP, **NO_PADDING),
    "smollm3": lambda: transformers.SmolLM3Config(**DEEP, **NO_PADDING, no_rope_layer_interval=2),
    "smollm3-window": lambda: transformers.SmolLM3Config(
        **DEEP,
        **NO_PADDING,
        no_rope_layers=[0, 1, 1, 0],
        use_sliding_window=True,
        sliding_window=5,
        tie_word_embeddings=False,
    ),
}


def frequencies(config, d, rope=None):
    """Of Llama 3.1's and linear scaling, in float64; transcribed from their publications."""
    rope, out = config.rope_parameters if rope is None else rope, []
    if rope["rope_type"] == "yarn":
        return yarn(d, rope)
    for i in range(0, d, 2):
        frequency = rope["rope_theta"] ** -(i / d)
        wavelength = 2 * math.pi / frequency
        if rope["rope_type"] == "linear":
            frequency /= rope["factor"]
        elif rope["rope_type"] == "llama3":
            long = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
            short = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
            if wavelength > long:
                frequency /= rope["factor"]
            elif wavelength > short:
                smooth = rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
                smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
                frequency = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        out.append(frequency)
    return torch.tensor(out, dtype=torch.float64)


def yarn(d, rope):
    """Arithmetic of arXiv 2309.00071, section 3.2 and appendix, with whole pairs as bounds (DeepSeek's code)."""
    base, length = rope["rope_theta"], rope["original_max_position_embeddings"]
    bounds = [
        d / 2 * math.log(length / (turns * 2 * math.pi), base) for turns in (rope["beta_fast"], rope["beta_slow"])
    ]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), d - 1)
    out = []
    for pair in range(d // 2):
        slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
        frequency = base ** (-2 * pair / d)
        out.append(slowed * frequency / rope["factor"] + (1 - slowed) * frequency)
    return torch.tensor(out, dtype=torch.float64)


def sigmoid_router(self, x):
    """DeepSeek-V3's: the best groups by their two largest scores with bias, weights without it."""
    logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
    scores = logits.sigmoid()
    by_group = (scores + self.e_score_correction_bias).unflatten(-1, (self.num_group, -1))
    best = by_group.topk(2).values.sum(-1).topk(self.topk_group).indices
    kept = torch.full_like(by_group, -torch.inf)
    for token, groups in enumerate(best.tolist()):
        kept[token, groups] = by_group[token, groups]
    chosen = kept.flatten(1).topk(self.top_k).indices
    weights = scores.gather(1, chosen)
    return logits, self.routed_scaling_factor * weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen


def exactly_deepseek(patch, norm):
    """The same of both DeepSeeks: rotations of pairs of neighbours, softmax and sigmoid routers."""

    def latent_rotary(self, x, position_ids):
        angle = position_ids[..., None].double() * frequencies(self.config, 2 * len(self.inv_freq))
        angle = torch.cat((angle, angle), -1)
        return angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling

    def complex_rotary(self, x, position_ids):
        angle = position_ids[..., None].double() * frequencies(self.config, 2 * len(self.inv_freq))
        return torch.polar(torch.ones_like(angle), angle) * self.attention_scaling

    def turn(q, k, factors):
        pairs = [torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k)]
        return tuple(torch.view_as_real(pair * factors[:, None]).flatten(3) for pair in pairs)

    def greedy_router(self, x):
        logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
        scores = logits.softmax(-1)
        if self.topk_method == "group_limited_greedy":
            by_group = scores.unflatten(-1, (self.num_group, -1))
            best = by_group.amax(-1).topk(self.topk_group).indices
            kept = torch.zeros_like(by_group[..., 0]).scatter_(1, best, 1.0)
            scores = (by_group * kept[..., None]).flatten(1)
        weights, chosen = scores.topk(self.top_k)
        return logits, self.routed_scaling_factor * weights, chosen

    patch.setattr(modeling_deepseek_v3.DeepseekV3RMSNorm, "forward", norm)
    patch.setattr(modeling_deepseek_v3.DeepseekV3RotaryEmbedding, "forward", latent_rotary)
    patch.setattr(modeling_deepseek_v3.DeepseekV3TopkRouter, "forward", sigmoid_router)
    patch.setattr(modeling_deepseek_v2.DeepseekV2RMSNorm, "forward", norm)
    patch.setattr(modeling_deepseek_v2.DeepseekV2RotaryEmbedding, "forward", complex_rotary)
    patch.setattr(modeling_deepseek_v2, "apply_rotary_emb", turn)
    patch.setattr(modeling_deepseek_v2.DeepseekV2TopkRouter, "forward", greedy_router)


def exactly(patch):
    """Their parts that compute in float32, in float64."""
    in_float64(patch)

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        angle = position_ids[..., None].double() * frequencies(self.config, 2 * len(self.inv_freq))
        return torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()

    for module, kind in ((modeling_mistral, "Mistral"), (modeling_phi3, "Phi3")):
        patch.setattr(getattr(module, f"{kind}RMSNorm"), "forward", norm)
        patch.setattr(getattr(module, f"{kind}RotaryEmbedding"), "forward", rotary)
    for module, kind in ((modeling_olmo2, "Olmo2"), (modeling_smollm3, "SmolLM3")):
        patch.setattr(getattr(module, f"{kind}RMSNorm"), "forward", norm)
        patch.setattr(getattr(module, f"{kind}RotaryEmbedding"), "forward", rotary)

    def router(self, x):
        logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
        weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        if getattr(self, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    for module, kind in ((modeling_mixtral, "Mixtral"), (modeling_qwen3_moe, "Qwen3Moe")):
        patch.setattr(getattr(module, f"{kind}RMSNorm"), "forward", norm)
        patch.setattr(getattr(module, f"{kind}RotaryEmbedding"), "forward", rotary)
        patch.setattr(getattr(module, f"{kind}TopKRouter"), "forward", router)

    patch.setattr(modeling_glm4_moe.Glm4MoeRMSNorm, "forward", norm)
    patch.setattr(modeling_glm4_moe.Glm4MoeRotaryEmbedding, "forward", rotary)
    patch.setattr(modeling_glm4_moe.Glm4MoeTopkRouter, "forward", sigmoid_router)

    exactly_deepseek(patch, norm)

    def gemma_norm(self, x):
        return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    def gemma_rotary(self, x, position_ids, kind):
        d = 2 * len(getattr(self, f"{kind}_inv_freq"))
        angle = position_ids[..., None].double() * frequencies(self.config, d, self.config.rope_parameters[kind])
        return torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()

    def gemma_embedding(self, tokens):
        return torch.nn.functional.embedding(tokens, self.weight) * self.embedding_dim**0.5

    patch.setattr(modeling_gemma3.Gemma3RMSNorm, "forward", gemma_norm)
    patch.setattr(modeling_gemma3.Gemma3RotaryEmbedding, "forward", gemma_rotary)
    patch.setattr(modeling_gemma3.Gemma3TextScaledWordEmbedding, "forward", gemma_embedding)
    patch.setattr(transformers.models.llama.modeling_llama.LlamaRotaryEmbedding, "forward", rotary)


def random_model(config):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    model.config._experts_implementation = "eager"  # their grouped product refuses float64
    torch.manual_seed(1)  # after theirs were drawn, which depend on torch's default dtype
    for p in model.parameters():  # biases start at zero and norms at one: make every number matter
        torch.nn.init.normal_(p, std=0.2, mean=float(p.dim() == 1))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # in float32 everywhere
            buffer.copy_(torch.randn(buffer.shape, dtype=torch.float32).mul_(0.1))
    return model
