"""Named specs. A new model is a `dataclasses.replace` of one of these."""

from dataclasses import replace
from typing import NoReturn

from torch import nn

from core.transformer.attention.latent import MultiLatentAttention
from core.transformer.attention.self_attention import CoreAttention, SelfAttention
from core.transformer.layer import PostNormLayer, SandwichNormLayer, TransformerLayer
from core.transformer.mlp import MLP
from core.transformer.moe import MoELayer
from core.transformer.norm import AllHeadsRMSNorm, build_norm
from core.transformer.positions import LearnedPositions, build_rotary
from core.transformer.spec import Build, TransformerLayerSpec


def feed_forward(build: Build) -> nn.Module:
    """The MLP of a layer, or its experts: what the configuration says of that layer."""
    if build.config.has_experts(build.layer):
        return MoELayer(build)
    return MLP(build)


def attention(build: Build, spec: TransformerLayerSpec) -> nn.Module:
    """The attention of a layer: what the configuration says."""
    if build.config.multi_latent_attention:
        return MultiLatentAttention(build, spec)
    return SelfAttention(build, spec)


# whichever of the two it is
vars(attention)["knows_context"] = True


def gpt2_spec() -> TransformerLayerSpec:
    """GPT-2 style: learned positions; norm, activation and biases as the configuration says."""
    return TransformerLayerSpec(
        layer=TransformerLayer,
        norm=build_norm,
        attention=attention,
        core_attention=CoreAttention,
        mlp=feed_forward,
        positions=LearnedPositions,
    )


def llama_spec() -> TransformerLayerSpec:
    """Llama and Qwen style: rotary positions.

    Their other facts are the configuration's: normalization="RMSNorm", activation_func="silu",
    gated_linear_unit=True, add_bias_linear=False, qk_layernorm=True (Qwen3), add_qkv_bias=True (Qwen2).
    """
    return replace(gpt2_spec(), positions=None, rotary=build_rotary)


def gemma3_spec() -> TransformerLayerSpec:
    """Gemma 3 style: as Llama's, with norms before and after attention and MLP."""
    return replace(llama_spec(), layer=SandwichNormLayer)


def olmo2_spec() -> TransformerLayerSpec:
    """OLMo 2 style: norms after attention and MLP only; with qk_layernorm=True, of all heads of a token together."""
    return replace(llama_spec(), layer=PostNormLayer, qk_norm=AllHeadsRMSNorm)


def moe_spec() -> TransformerLayerSpec:
    """Mixtral style: as Llama's; `num_moe_experts` puts experts in the place of MLPs, under every spec."""
    return llama_spec()


def mla_spec() -> TransformerLayerSpec:
    """DeepSeek style: as Llama's; `multi_latent_attention` makes keys and values of latents, under every spec."""
    return llama_spec()


def get_gpt_layer_local_spec() -> TransformerLayerSpec:
    """Megatron's name for the default: learned positions, no part that needs more than torch."""
    return gpt2_spec()


# by the name that a checkpoint says
SPECS = {"gpt2": gpt2_spec, "llama": llama_spec, "gemma3": gemma3_spec, "olmo2": olmo2_spec}


def __getattr__(name: str) -> NoReturn:
    if name == "get_gpt_layer_with_transformer_engine_spec":
        raise ImportError(
            f"{name} is not here: use get_gpt_layer_local_spec(); there is one implementation, torch's"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
