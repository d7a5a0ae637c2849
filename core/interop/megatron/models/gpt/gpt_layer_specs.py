"""Specs by Megatron's names: all are made of torch's own operations here."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from core.interop.megatron.absent import absent_names
from core.models.gpt.gpt_layer_specs import attention, feed_forward, gpt2_spec
from core.transformer.spec import Build, TransformerLayerSpec


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    **more: Any,
) -> TransformerLayerSpec:
    """The layer; its norm, activation and positions follow from the configuration and the model.

    num_experts: the configuration's num_moe_experts, whose `moe_layer_freq` says in which layers. moe_grouped_gemm:
    without effect, products of experts are grouped where that is right and faster. multi_latent_attention: the
    configuration's (`MLATransformerConfig`). qk_layernorm: the configuration's, which may say it alone.
    Raises ValueError: parts that are not here. A model raises it of num_experts, multi_latent_attention and
    qk_layernorm that are not the configuration's.
    """
    without_effect = (None, False, 0, "LayerNorm", "RMSNorm")
    unsupported = [name for name, value in more.items() if value not in without_effect]
    if unsupported:
        raise ValueError(
            f"{len(unsupported)} arguments ask for parts that are not here: {', '.join(unsupported)}"
        )
    build_attention = partial(_attention, bool(multi_latent_attention), bool(qk_layernorm))
    vars(build_attention)["knows_context"] = True
    return replace(
        gpt2_spec(), attention=build_attention, mlp=partial(_feed_forward, num_experts or None)
    )


def _attention(
    is_latent: bool, has_norms: bool, build: Build, spec: TransformerLayerSpec
) -> nn.Module:
    if has_norms and not build.config.qk_layernorm:
        raise ValueError(
            "get_gpt_layer_local_spec(qk_layernorm=True), and the configuration says qk_layernorm=False; "
            "TransformerConfig(qk_layernorm=True) makes the norms"
        )
    if build.config.multi_latent_attention != is_latent:
        raise ValueError(
            f"get_gpt_layer_local_spec(multi_latent_attention={is_latent}), and the configuration says "
            f"multi_latent_attention={build.config.multi_latent_attention}; give both the same, MLATransformerConfig "
            "with True"
        )
    return attention(build, spec)


def _feed_forward(num_experts: int | None, build: Build) -> nn.Module:
    if build.config.num_moe_experts != num_experts:
        raise ValueError(
            f"get_gpt_layer_local_spec(num_experts={num_experts}), and TransformerConfig says num_moe_experts="
            f"{build.config.num_moe_experts}; give both the same number, or neither"
        )
    return feed_forward(build)


__getattr__ = absent_names(__name__)
