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
    """The layer; which norm, activation and positions it has, configuration and model say.

    Raises ValueError: experts, latent attention and other parts that are not here; qk_layernorm, the configuration's.
    """
    asked = {"num_experts": num_experts, "qk_layernorm": qk_layernorm} | more
    normal = ("LayerNorm", "RMSNorm")
    if wrong := [name for name, value in asked.items() if value not in (None, False, 0) and value not in normal]:
        remedy = "; TransformerConfig(qk_layernorm=True) says it" if "qk_layernorm" in wrong else ""
        raise ValueError(f"{len(wrong)} arguments ask for parts that are not here: {', '.join(wrong)}{remedy}")
    return gpt2_spec()
