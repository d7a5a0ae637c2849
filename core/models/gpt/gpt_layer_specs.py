"""Named specs. A new model is a `dataclasses.replace` of one of these."""

from dataclasses import replace

from core.transformer.attention import CoreAttention, SelfAttention
from core.transformer.layer import TransformerLayer
from core.transformer.mlp import MLP
from core.transformer.norm import build_norm
from core.transformer.positions import LearnedPositions, Rotary
from core.transformer.spec import TransformerLayerSpec


def gpt2_spec() -> TransformerLayerSpec:
    """GPT-2 style: learned positions; norm, activation and biases as the configuration says."""
    return TransformerLayerSpec(
        layer=TransformerLayer,
        norm=build_norm,
        attention=SelfAttention,
        core_attention=CoreAttention,
        mlp=MLP,
        positions=LearnedPositions,
    )


def llama_spec() -> TransformerLayerSpec:
    """Llama and Qwen style: rotary positions.

    Their other facts are the configuration's: normalization="RMSNorm", activation_func="silu",
    gated_linear_unit=True, add_bias_linear=False, qk_layernorm=True (Qwen3), add_qkv_bias=True (Qwen2).
    """
    return replace(gpt2_spec(), positions=None, rotary=Rotary)


def get_gpt_layer_local_spec() -> TransformerLayerSpec:
    """Megatron's name for the default: learned positions, no part that needs more than torch."""
    return gpt2_spec()
