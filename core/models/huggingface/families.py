"""The families of Hugging Face models: from their configuration to our form of it, and back.

What cannot be represented is refused by name; a field that nobody reads is told. Nothing here imports transformers.
`docs/recipes/add_a_model.md` adds a family.
"""

import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from core.models.gpt.gpt_layer_specs import gemma3_spec, olmo2_spec
from core.models.huggingface.facts import Facts
from core.models.huggingface.family.deepseek import DeepseekV2, DeepseekV3
from core.models.huggingface.family.experts import Glm4Moe, Mixtral, Qwen3Moe
from core.models.huggingface.family.family import Family, HuggingFaceModel, Rules
from core.models.huggingface.family.gemma3 import Gemma3
from core.models.huggingface.family.gpt2 import gpt2_fields, gpt2_model, gpt2_rules
from core.models.huggingface.family.llama_like import LlamaLike
from core.models.huggingface.family.others import OTHERS
from core.models.huggingface.family.smollm3 import SmolLM3
from core.models.huggingface.rows import (
    DEEPSEEK_ROWS,
    GEMMA3_ROWS,
    GPT2_ROWS,
    MIXTRAL_ROWS,
    MOE_ROWS,
    OLMO2_ROWS,
    PHI3_ROWS,
)
from core.parallel_state.config import raise_all

# what is given below are the defaults of transformers' classes: a config.json may leave them out
_PHI3 = LlamaLike(window="always", partial_rotary=True, dropout=True, epsilon=1e-5)
_OLMO2 = LlamaLike(spec=olmo2_spec, attention_bias=True, qk_norm=True, epsilon=1e-5)
_SMOLLM3 = SmolLM3(
    attention_bias=True,
    mlp_bias=True,
    window="by layer",
    tied=True,
    rope_theta=2_000_000.0,
    groups=4,
)
_GEMMA3 = Gemma3(
    spec=gemma3_spec,
    attention_bias=True,
    qk_norm=True,
    activation_field="hidden_activation",
    activation="gelu_pytorch_tanh",
    tied=True,
    groups=4,
    head_size=256,
    sliding_window=4096,
)
_MIXTRAL = Mixtral(window="always", epsilon=1e-5, rope_theta=1e6, groups=8)
_QWEN3_MOE = Qwen3Moe(
    attention_bias=True, qk_norm=True, window="always", groups=4, sliding_window=4096
)
_GLM4_MOE = Glm4Moe(attention_bias=True, partial_rotary=True, epsilon=1e-5, groups=8)

# by model_type; a model that was born here is exported as the first that says all of its facts
FAMILIES: dict[str, Family] = {
    "llama": LlamaLike(attention_bias=True, mlp_bias=True).family("LlamaForCausalLM"),
    "mistral": LlamaLike(window="always", sliding_window=4096).family("MistralForCausalLM"),
    "qwen2": LlamaLike(qkv_bias=True, window="by layer").family("Qwen2ForCausalLM"),
    "qwen3": LlamaLike(attention_bias=True, qk_norm=True, window="by layer").family(
        "Qwen3ForCausalLM"
    ),
    "smollm3": _SMOLLM3.family("SmolLM3ForCausalLM"),
    "phi3": _PHI3.family("Phi3ForCausalLM", PHI3_ROWS),
    "olmo2": _OLMO2.family("Olmo2ForCausalLM", OLMO2_ROWS),
    "gemma3_text": _GEMMA3.family("Gemma3ForCausalLM", GEMMA3_ROWS),
    "mixtral": _MIXTRAL.family("MixtralForCausalLM", MIXTRAL_ROWS),
    "qwen3_moe": _QWEN3_MOE.family("Qwen3MoeForCausalLM", MOE_ROWS),
    "glm4_moe": _GLM4_MOE.family("Glm4MoeForCausalLM", MOE_ROWS),
    "deepseek_v3": DeepseekV3().family("DeepseekV3ForCausalLM", DEEPSEEK_ROWS),
    "deepseek_v2": DeepseekV2().family("DeepseekV2ForCausalLM", DEEPSEEK_ROWS),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        model=gpt2_model,
        rules=gpt2_rules,
        fields=gpt2_fields,
        rows=GPT2_ROWS,
    ),
}
# other names of the same models, in configurations that bring a copy of the class
ALIASES = {"kimi_k2": "deepseek_v3"}


def from_huggingface(hf: Any, *, params_dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    """Our form of a Hugging Face model.

    hf: a transformers configuration object, the fields of a `config.json`, or the folder that holds one.
    Warns of fields that nobody here reads. Raises ValueError: a model type, or facts of the model that we cannot
    represent (all of them at once).
    """
    facts = Facts.of_folder(hf) if isinstance(hf, str | Path) else Facts(hf)
    family = family_of(facts)
    try:
        raise_all(
            "from_huggingface",
            chain(_common_rules(facts, family.architecture), family.rules(facts)),
        )
        model = family.model(facts, params_dtype)
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"the configuration has a field of another kind than its model type: {error}"
        ) from error
    # last, when everything that matters has been read
    if overlooked := facts.overlooked():
        warnings.warn(
            f"the configuration says {', '.join(overlooked)}, which nothing here reads; the numbers may differ from "
            "those of transformers. Remove what does not matter",
            stacklevel=2,
        )
    return model


def family_of(facts: Facts) -> Family:
    """Raises ValueError: a model type that is not supported."""
    kind = facts["model_type"]
    if isinstance(kind, str):
        kind = ALIASES.get(kind, kind)
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    if isinstance(kind, str) and kind in OTHERS:
        raise ValueError(f"model_type={kind!r} is not supported: {OTHERS[kind]}")
    raise ValueError(
        f"model_type={kind!r} is not supported; known: {', '.join(sorted(FAMILIES))}. "
        f"docs/recipes/add_a_model.md adds a family; of this one: {_beside_llama(facts)}"
    )


def _beside_llama(facts: Facts) -> str:
    """What the configuration of an unknown model type says that Llama's does not, and lacks of Llama's."""
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    lacking = [name for name in sizes if facts.get(name) is None]
    if lacking:
        return f"it has no {', '.join(lacking)}"
    try:
        llama = FAMILIES["llama"]
        differing = [message for holds, message in llama.rules(facts) if not holds]
        llama.model(facts, torch.float32)
    except (ValueError, TypeError, AttributeError) as error:
        differing = [str(error)]
    if unread := facts.overlooked():
        differing.append(f"it says {', '.join(unread)}")
    differences = "; ".join(differing)
    if differences:
        return f"read as a Llama, {differences}"
    return "its fields are Llama's, so that what differs is in its code only"


def _common_rules(facts: Facts, architecture: str) -> Rules:
    remote = str((facts.get("auto_map") or {}).get("AutoModelForCausalLM", architecture))
    yield (
        remote.rpartition(".")[2]
        == architecture,  # many folders bring a copy of transformers' own class
        f"auto_map says that the model is code of the folder ({remote}), not transformers' {architecture}; nothing "
        "here runs code of a folder. Where the numbers are the same, remove auto_map",
    )
    quantized = facts.get("quantization_config")
    tied = facts.get("tie_word_embeddings", False)
    yield (
        isinstance(tied, bool),
        f"tie_word_embeddings={tied} is neither true nor false; say which the model is",
    )
    yield (
        not quantized,
        f"quantization_config={quantized} is not supported; dequantize the weights, and remove it",
    )
