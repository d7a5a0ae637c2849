"""Families of Hugging Face models: what each field of their configuration is here, and the rows of their weights.

What cannot be represented is refused by name; a field that nobody reads is told. Nothing here imports transformers.
`docs/concepts/huggingface.md#add-a-model` adds a family.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from core.models.gpt.gpt_layer_specs import gpt2_spec, llama_spec
from core.models.huggingface.facts import Facts
from core.models.huggingface.rows import GPT2_ROWS, LLAMA_ROWS, PHI3_ROWS, Row
from core.parallel_state.config import raise_all
from core.transformer.spec import TransformerLayerSpec
from core.transformer.transformer_config import RotaryScaling, TransformerConfig

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
_SCALINGS = ("default", "linear", "llama3")

Rules = Iterator[tuple[bool, str]]  # (whether it holds, what is said where it does not)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """What GPTModel(**) needs to be the same model: config, spec, sizes, tying."""

    config: TransformerConfig
    transformer_layer_spec: TransformerLayerSpec
    vocab_size: int
    max_sequence_length: int
    share_embeddings_and_output_weights: bool

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of GPTModel."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`.

    architecture: the class that `AutoModelForCausalLM` makes of it. model: our form of its fields, with a dtype.
    rules: what it may say that cannot be represented here. rows: our parameters <- their tensors.
    """

    architecture: str
    model: Callable[[Facts, torch.dtype], HuggingFaceModel]
    rules: Callable[[Facts], Rules]
    rows: tuple[Row, ...]


def from_huggingface(hf: Any, *, params_dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    """Our form of a Hugging Face model.

    hf: a transformers configuration object, the fields of a `config.json`, or the folder that holds one.
    Warns of fields that nobody here reads. Raises ValueError: a model type, or facts of the model that we cannot
    represent (all of them at once).
    """
    facts = Facts.of_folder(hf) if isinstance(hf, str | Path) else Facts(hf)
    family = family_of(facts)
    try:
        raise_all("from_huggingface", chain(_common_rules(facts), family.rules(facts)))
        model = family.model(facts, params_dtype)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the configuration has a field of another kind than its model type: {error}") from error
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
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r} is not supported; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind]


def _common_rules(facts: Facts) -> Rules:
    quantized = facts.get("quantization_config")
    yield not quantized, f"quantization_config={quantized} is not supported; dequantize the weights, and remove it"


def _rotary(facts: Facts) -> dict[str, Any]:
    """rope_parameters of today, or rope_theta, rope_scaling and partial_rotary_factor of older files."""
    today = facts.get("rope_parameters") or {}
    scaling = {**(facts.get("rope_scaling") or {}), **today}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    older_base, older_percent = facts.get("rope_theta", 10000.0), facts.get("partial_rotary_factor", 1.0)
    typed = None
    if kind != "default":
        # Llama 3's scaling starts from the model's positions where no others are said
        scaling.setdefault("original_max_position_embeddings", facts["max_position_embeddings"])
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        typed = RotaryScaling(kind=kind, **{name: scaling[name] for name in names if name in scaling})
    return {
        "rotary_base": scaling.get("rope_theta", older_base),
        "rotary_percent": scaling.get("partial_rotary_factor", older_percent),
        "rotary_scaling": typed,
    }


def _is_supported(facts: Facts) -> bool:
    return all(holds for holds, _ in _rotary_rules(facts))


def _rotary_rules(facts: Facts) -> Rules:
    today, older = facts.get("rope_parameters") or {}, facts.get("rope_scaling") or {}
    yield (
        not (today and older) or today == older,
        f"rope_parameters={today} and rope_scaling={older} contradict each other; leave one out",
    )
    for rope in (today, older):
        kind = rope.get("rope_type", rope.get("type", "default"))
        yield kind in _SCALINGS, f"rope_type={kind!r} is not supported; {', '.join(_SCALINGS)} are"


@dataclass(frozen=True, kw_only=True)
class _LlamaLike:
    """What families of Llama's shape differ in: RMSNorm, rotary positions and a gated MLP they all have.

    attention_bias, mlp_bias: whether the family has a field of that name (others ignore one). qkv_bias: a bias on
    query, key and value always. qk_norm: query and key heads are normalised. window: "never", "always" where a
    `sliding_window` is set, or "by layer", as `use_sliding_window` and
    `layer_types` or `max_window_layers` say. partial_rotary: it has `partial_rotary_factor`. dropout: it has
    `resid_pdrop`.
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: str = "never"
    partial_rotary: bool = False
    dropout: bool = False
    epsilon: float = 1e-6
    sliding_window: int | None = None  # where the configuration does not say

    def model(self, facts: Facts, params_dtype: torch.dtype) -> HuggingFaceModel:
        hidden, heads = facts["hidden_size"], facts["num_attention_heads"]
        activation = facts.get("hidden_act", "silu")
        config = TransformerConfig(
            num_layers=facts["num_hidden_layers"],
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=facts.get("num_key_value_heads") or heads,
            ffn_hidden_size=facts["intermediate_size"],
            kv_channels=facts.get("head_dim") or hidden // heads,
            normalization="RMSNorm",
            layernorm_epsilon=facts.get("rms_norm_eps", self.epsilon),
            qk_layernorm=self.qk_norm,
            activation_func=_ACTIVATIONS.get(activation, activation),
            gated_linear_unit=True,
            add_bias_linear=self._biases(facts) == (True, True),
            add_qkv_bias=self.qkv_bias,
            hidden_dropout=facts.get("resid_pdrop", 0.0) if self.dropout else 0.0,
            attention_dropout=facts.get("attention_dropout", 0.0),
            **_rotary(facts),
            windows=self._windows(facts),
            init_method_std=facts.get("initializer_range", 0.02),
            params_dtype=params_dtype,
        )
        return HuggingFaceModel(
            config=config,
            transformer_layer_spec=llama_spec(),
            vocab_size=facts["vocab_size"],
            max_sequence_length=facts["max_position_embeddings"],
            share_embeddings_and_output_weights=facts.get("tie_word_embeddings", False),
        )

    def rules(self, facts: Facts) -> Rules:
        yield from _rotary_rules(facts)
        percent = _rotary(facts)["rotary_percent"] if _is_supported(facts) else 1.0
        yield (
            self.partial_rotary or percent == 1.0,
            f"partial_rotary_factor={percent} is not this family's; remove it",
        )
        if self.window == "always":
            kinds = set(facts.get("layer_types") or ()) - {"sliding_attention"}
            yield not kinds, f"layer_types names {sorted(kinds)}: this family's layers all have the window; remove it"
        if self.window == "by layer":
            slides = "sliding_attention" in (facts.get("layer_types") or ())
            yield (
                not (slides and facts.get("use_sliding_window") is False),
                "use_sliding_window=False contradicts layer_types, which names sliding_attention; change one of them",
            )
        attention, mlp = self._biases(facts)
        flags = f"attention_bias={attention}" + (f" with mlp_bias={mlp}" if self.mlp_bias else "")
        remedy = "both True or both False" if self.mlp_bias else "attention_bias=False"
        yield (
            attention == mlp,
            f"{flags} is not supported: here all linear layers of attention and MLP have a bias, or none has; "
            f"what can be represented is {remedy}",
        )
        if self.dropout:
            yield from _one_dropout(facts)

    def _biases(self, facts: Facts) -> tuple[bool, bool]:
        """Whether (all four projections of the attention, the MLP) have biases."""
        attention = self.attention_bias and bool(facts.get("attention_bias", False))
        return attention, self.mlp_bias and bool(facts.get("mlp_bias", False))

    def _windows(self, facts: Facts) -> tuple[int | None, ...] | None:
        """How many tokens a token sees in each layer; see `TransformerConfig.windows`."""
        if self.window == "never":
            return None
        layers, window = facts["num_hidden_layers"], facts.get("sliding_window", self.sliding_window)
        if self.window == "always":
            return (window,) * layers if window is not None else None
        slides = bool(facts.get("use_sliding_window", False))
        by_layer, first = facts.get("layer_types"), facts.get("max_window_layers", 28)
        if not slides or window is None:
            return None
        if by_layer is None:
            return tuple(window if number >= first else None for number in range(layers))
        return tuple(window if kind == "sliding_attention" else None for kind in by_layer)


def _one_dropout(facts: Facts, default: float = 0.0) -> Rules:
    embedding, residual = facts.get("embd_pdrop", default), facts.get("resid_pdrop", default)
    yield (
        embedding == residual,
        f"embd_pdrop={embedding} with resid_pdrop={residual} is not supported: one hidden_dropout serves "
        "both; set them to the same value",
    )


def _gpt2_rules(facts: Facts) -> Rules:
    scaled, by_layer = facts.get("scale_attn_weights", True), facts.get("scale_attn_by_inverse_layer_idx", False)
    yield scaled, f"scale_attn_weights={scaled} is not supported: scores are scaled by 1/sqrt(head size); use True"
    yield (
        not by_layer,
        f"scale_attn_by_inverse_layer_idx={by_layer} is not supported: all layers scale scores alike; use False",
    )
    cross = facts.get("add_cross_attention", False)
    yield not cross, f"add_cross_attention={cross} is not supported: there is no encoder to attend to; use False"
    yield from _one_dropout(facts, default=0.1)


def _gpt2(facts: Facts, params_dtype: torch.dtype) -> HuggingFaceModel:
    activation = facts.get("activation_function", "gelu_new")
    config = TransformerConfig(
        num_layers=facts["n_layer"],
        hidden_size=facts["n_embd"],
        num_attention_heads=facts["n_head"],
        ffn_hidden_size=facts.get("n_inner") or 4 * facts["n_embd"],
        layernorm_epsilon=facts.get("layer_norm_epsilon", 1e-5),
        activation_func=_ACTIVATIONS.get(activation, activation),
        hidden_dropout=facts.get("resid_pdrop", 0.1),
        attention_dropout=facts.get("attn_pdrop", 0.1),
        init_method_std=facts.get("initializer_range", 0.02),
        params_dtype=params_dtype,
    )
    return HuggingFaceModel(
        config=config,
        transformer_layer_spec=gpt2_spec(),
        vocab_size=facts["vocab_size"],
        max_sequence_length=facts["n_positions"],
        share_embeddings_and_output_weights=facts.get("tie_word_embeddings", True),
    )


def _llama_like(architecture: str, like: _LlamaLike, rows: tuple[Row, ...] = LLAMA_ROWS) -> Family:
    return Family(architecture=architecture, model=like.model, rules=like.rules, rows=rows)


_PHI3 = _LlamaLike(window="always", partial_rotary=True, dropout=True, epsilon=1e-5)

FAMILIES: dict[str, Family] = {
    "llama": _llama_like("LlamaForCausalLM", _LlamaLike(attention_bias=True, mlp_bias=True)),
    "mistral": _llama_like("MistralForCausalLM", _LlamaLike(window="always", sliding_window=4096)),
    "qwen2": _llama_like("Qwen2ForCausalLM", _LlamaLike(qkv_bias=True, window="by layer")),
    "qwen3": _llama_like("Qwen3ForCausalLM", _LlamaLike(attention_bias=True, qk_norm=True, window="by layer")),
    "phi3": _llama_like("Phi3ForCausalLM", _PHI3, PHI3_ROWS),
    "gpt2": Family(architecture="GPT2LMHeadModel", model=_gpt2, rules=_gpt2_rules, rows=GPT2_ROWS),
}
