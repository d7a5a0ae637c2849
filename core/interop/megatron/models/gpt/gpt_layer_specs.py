"""Specs by Megatron's names: all are made of torch's own operations here."""

from typing import Any

from core.models.gpt.gpt_layer_specs import gpt2_spec
from core.transformer.spec import TransformerLayerSpec


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    **more: Any,
) -> TransformerLayerSpec:
    """The layer; its norm, activation and positions follow from the configuration and the model.

    Raises ValueError: experts, latent attention and other parts that are not here; qk_layernorm, the configuration's.
    """
    arguments = {"num_experts": num_experts, "qk_layernorm": qk_layernorm} | more
    without_effect = (None, False, 0, "LayerNorm", "RMSNorm")
    unsupported = [name for name, value in arguments.items() if value not in without_effect]
    if unsupported:
        remedy = "; TransformerConfig(qk_layernorm=True) says it" if "qk_layernorm" in unsupported else ""
        raise ValueError(
            f"{len(unsupported)} arguments ask for parts that are not here: {', '.join(unsupported)}{remedy}"
        )
    return gpt2_spec()
