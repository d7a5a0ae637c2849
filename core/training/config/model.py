"""The settings of a model: its style and sizes, in plain values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from core.models import gpt
from core.parallel_state.config import raise_all
from core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from core.transformer.spec import TransformerLayerSpec

STYLES: dict[str, dict[str, Any]] = {
    "llama": {
        "normalization": "RMSNorm",
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
    },
    "gpt2": {"activation_func": "gelu_tanh"},
}

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model by its style and sizes; `transformer()` spells it out. Weights are float32, or of 16 bits.

    Raises ValueError: an unknown style, two dtypes at once.
    """

    style: Literal["llama", "gpt2"] = "llama"
    """llama: RMSNorm, rotary positions, gated SiLU, no biases. gpt2: LayerNorm, learned positions, GELU, biases."""

    num_layers: int = 4
    """Transformer layers of the whole model, before they are divided into pipeline stages."""

    hidden_size: int = 192
    """Elements of the residual stream per token; a multiple of num_attention_heads."""

    num_attention_heads: int = 8
    """Query heads of a layer; a multiple of parallel.tensor."""

    num_query_groups: int | None = None
    """Key and value heads of a layer, each shared by as many query heads; default: one per query head."""

    ffn_hidden_size: int | None = 512
    """Elements between the two products of the MLP; None: 4 x hidden_size."""

    dropout: float = 0.0
    """Share of elements that dropout zeroes, in the residual stream and in attention; 0 drops nothing."""

    tie_embeddings: bool = True
    """The output layer uses the table of the token embeddings."""

    bf16: bool = False
    """Weights and activations in bfloat16, with float32 copies in the optimizer (optimizer.main_params)."""

    fp16: bool = False
    """Weights and activations in float16, with a loss scale that follows overflows."""

    seed: int = 1234
    """Seed of the initial weights; they do not depend on the layout of ranks."""

    def __post_init__(self) -> None:
        rules = [
            (self.style in STYLES, f"unknown style {self.style!r}; known: {', '.join(STYLES)}"),
            (not (self.bf16 and self.fp16), "bf16 and fp16 are 2 dtypes for one model; give one of them"),
        ]
        raise_all("ModelConfig", rules)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        if self.bf16:
            return torch.bfloat16
        return torch.float16 if self.fp16 else torch.float32

    def transformer(self) -> TransformerConfig:
        """The model's TransformerConfig. Raises ValueError with every mistake."""
        return TransformerConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            ffn_hidden_size=self.ffn_hidden_size,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
            params_dtype=self.dtype,
            **STYLES[self.style],
        )

    def spec(self) -> "TransformerLayerSpec":
        """The modules of its layers."""
        return gpt.llama_spec() if self.style == "llama" else gpt.gpt2_spec()
