"""Published models by name: the facts that their makers published, and how large they are with their vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One published model.

    style: "llama" or "gpt2". facts: what its TransformerConfig has beyond the style. tied: one table for embedding
    and output. vocab_size, positions, parameters: as published; a run has its tokenizer's vocabulary and its length.
    """

    style: str
    facts: Mapping[str, Any]
    tied: bool
    vocab_size: int
    positions: int
    parameters: int


def _llama3(
    sizes: Mapping[str, Any], factor: float, parameters: int, *, tied: bool = False
) -> Preset:
    """Llama 3.1 and 3.2 (arXiv 2407.21783, table 3): head size and scaling of the rotary base are the family's."""
    scaling = {
        "kind": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    facts = {
        "num_query_groups": 8,
        "rotary_base": 500000.0,
        "rotary_scaling": scaling,
        "layernorm_epsilon": 1e-5,
    }
    return Preset(
        style="llama",
        facts={**facts, **sizes},
        tied=tied,
        vocab_size=128256,
        positions=131072,
        parameters=parameters,
    )


def _qwen3(sizes: Mapping[str, Any], parameters: int, *, tied: bool = False) -> Preset:
    """Qwen3 (arXiv 2505.09388, table 1): heads of 128 whatever the width, norms of query and key heads."""
    family = {
        "num_query_groups": 8,
        "kv_channels": 128,
        "qk_layernorm": True,
        "rotary_base": 1000000.0,
        "layernorm_epsilon": 1e-6,
    }
    return Preset(
        style="llama",
        facts={**family, **sizes},
        tied=tied,
        vocab_size=151936,
        positions=40960,
        parameters=parameters,
    )


def _gpt2(num_layers: int, hidden_size: int, num_attention_heads: int, parameters: int) -> Preset:
    """GPT-2 as its weights were published (table 2 of its paper counts otherwise)."""
    facts = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "ffn_hidden_size": 4 * hidden_size,
    }
    return Preset(
        style="gpt2",
        facts=facts,
        tied=True,
        vocab_size=50257,
        positions=1024,
        parameters=parameters,
    )


def _small_llama(sizes: Mapping[str, Any], parameters: int) -> Preset:
    """Llamas for experiments: 60m of ReLoRA and GaLore (arXiv 2403.03507), 160m of SpecInfer (arXiv 2305.09781)."""
    return Preset(
        style="llama",
        facts={"layernorm_epsilon": 1e-6, **sizes},
        tied=False,
        vocab_size=32000,
        positions=2048,
        parameters=parameters,
    )


def _sizes(
    num_layers: int, hidden_size: int, num_attention_heads: int, ffn_hidden_size: int
) -> dict[str, int]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "ffn_hidden_size": ffn_hidden_size,
    }


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "llama-60m": _small_llama(_sizes(8, 512, 8, 1376), 58_073_600),
        "llama-160m": _small_llama(_sizes(12, 768, 12, 3072), 162_417_408),
        "llama-1b": _llama3(_sizes(16, 2048, 32, 8192), 32.0, 1_235_814_400, tied=True),
        "llama-8b": _llama3(_sizes(32, 4096, 32, 14336), 8.0, 8_030_261_248),
        "llama-70b": _llama3(_sizes(80, 8192, 64, 28672), 8.0, 70_553_706_496),
        "qwen3-0.6b": _qwen3(_sizes(28, 1024, 16, 3072), 596_049_920, tied=True),
        "qwen3-8b": _qwen3(_sizes(36, 4096, 32, 12288), 8_190_735_360),
        "gpt2-124m": _gpt2(12, 768, 12, 124_439_808),
        "gpt2-1.5b": _gpt2(48, 1600, 25, 1_557_611_200),
    }
)
