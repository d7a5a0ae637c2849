"""Whole styles of models as one call: no line of a reader's can forget that a Llama has no biases."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from core.elsewhere import OF_A_MODEL
from core.field_names import tells_names
from core.transformer.transformer_config import TransformerConfig

# style -> what makes it one; everything else of a TransformerConfig is sizes
STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {
            "normalization": "RMSNorm",
            "activation_func": "silu",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "gpt2": {"normalization": "LayerNorm", "activation_func": "gelu_tanh"},
    }
)


@tells_names("model", OF_A_MODEL, fields_of=TransformerConfig)
def llama_config(
    *, num_layers: int, hidden_size: int, num_attention_heads: int, **facts: Any
) -> TransformerConfig:
    """Llama's facts: RMSNorm, gated SiLU, no biases, no dropout; positions are `llama_spec()`'s.

    facts: further fields of `TransformerConfig`, which win: num_query_groups, ffn_hidden_size (the width of gate and
    up each), rotary_base, qk_layernorm=True (Qwen3), add_qkv_bias=True (Qwen2).
    """
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        **{**STYLES["llama"], **facts},
    )


@tells_names("model", OF_A_MODEL, fields_of=TransformerConfig)
def gpt2_config(
    *, num_layers: int, hidden_size: int, num_attention_heads: int, **facts: Any
) -> TransformerConfig:
    """GPT-2's facts: LayerNorm, GELU by tanh, biases, dropout 0.1; positions are `gpt2_spec()`'s.

    facts: further fields of `TransformerConfig`, which win.
    """
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        **{**STYLES["gpt2"], **facts},
    )
