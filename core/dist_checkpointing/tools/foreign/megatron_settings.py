"""What Megatron's arguments say of a model, as the settings of a run here that begins with its weights. Pure."""

from collections.abc import Mapping
from typing import Any

# the same meaning: Megatron's argument -> field of `model`
_SAME = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "kv_channels",
    "ffn_hidden_size": "ffn_hidden_size",
    "normalization": "normalization",
    "norm_epsilon": "layernorm_epsilon",
    "layernorm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "qk_layernorm": "qk_layernorm",
    "add_bias_linear": "add_bias_linear",
    "add_qkv_bias": "add_qkv_bias",
    "max_position_embeddings": "max_position_embeddings",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "rotary_interleaved": "rotary_interleaved",
    "padded_vocab_size": "vocab_size",
    "num_experts": "num_moe_experts",
    "moe_router_topk": "moe_router_topk",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "moe_router_score_function": "moe_router_score_function",
    "moe_router_pre_softmax": "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor": "moe_router_topk_scaling_factor",
}
_ROTARY = {"rotary_base", "rotary_percent", "rotary_interleaved"}


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`model.FIELD` -> value; {} where a model's part has no setting here, so that nothing is half said."""
    kind = _positions(arguments)
    if arguments.get("multi_latent_attention") or kind is None or _scales_otherwise(arguments):
        return {}
    has_experts = bool(arguments.get("num_experts"))
    settings: dict[str, Any] = {}
    for name, field in _SAME.items():
        value = arguments.get(name)
        is_plain = isinstance(value, (bool, int, float, str))
        is_unused = ("moe" in field and not has_experts) or (name in _ROTARY and kind != "rope")
        if is_plain and not is_unused:
            settings[f"model.{field}"] = value
    if arguments.get("group_query_attention"):
        settings["model.num_query_groups"] = arguments["num_query_groups"]
    settings["model.activation_func"] = _activation(arguments)
    settings["model.gated_linear_unit"] = bool(arguments.get("swiglu"))
    settings["model.position_embedding_type"] = kind
    settings["model.style"] = "gpt2" if kind == "learned_absolute" else "llama"
    untied = arguments.get("untie_embeddings_and_output_weights")
    settings["model.tie_embeddings"] = not untied
    if scaling := _rotary_scaling(arguments):
        settings["model.rotary_scaling"] = scaling
    length = arguments.get("seq_length") or arguments.get("max_position_embeddings")
    if isinstance(length, int):
        settings["data.sequence_length"] = length
    return settings


def _positions(arguments: Mapping[str, Any]) -> str | None:
    """How the model knows positions; None: in a way that is not here."""
    # older than the argument that names the kind
    if arguments.get("use_rotary_position_embeddings"):
        return "rope"
    kind = arguments.get("position_embedding_type", "learned_absolute")
    return kind if kind in ("rope", "learned_absolute", "none") else None


def _activation(arguments: Mapping[str, Any]) -> str:
    if arguments.get("swiglu"):
        return "silu"
    if arguments.get("squared_relu"):
        return "squared_relu"
    # the kernel that adds the bias, too, approximates by a tanh; it is Megatron's default where there are biases
    fused = arguments.get("bias_gelu_fusion") and arguments.get("add_bias_linear", True)
    return "gelu_tanh" if arguments.get("openai_gelu") or fused else "gelu"


def _rotary_scaling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    if arguments.get("use_rope_scaling"):
        # Megatron fixes the others to those of Llama 3.1
        return {
            "kind": "llama3",
            "factor": float(arguments.get("rope_scaling_factor") or 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if factor := arguments.get("rotary_seq_len_interpolation_factor"):
        return {"kind": "linear", "factor": float(factor)}
    return {}


def _scales_otherwise(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("quick_geglu") or arguments.get("rope_type") == "yarn")
