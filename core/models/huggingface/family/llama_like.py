"""Llama and its relatives: RMSNorm, rotary positions, a gated MLP; what they differ in are the fields of a class."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from core.models.gpt.gpt_layer_specs import llama_spec
from core.models.huggingface.facts import Facts
from core.models.huggingface.family.family import (
    ACTIVATIONS,
    Family,
    Fields,
    HuggingFaceModel,
    Rules,
    activation_name,
    one_dropout,
)
from core.models.huggingface.family.rope import (
    SCALINGS,
    one_rotary,
    rope_fields,
    rope_kind,
    rotary_rules,
)
from core.models.huggingface.rows import LLAMA_ROWS, Row
from core.transformer.spec import TransformerLayerSpec
from core.transformer.transformer_config import TransformerConfig

Windows = tuple[int | None, ...] | None


@dataclass(frozen=True, kw_only=True)
class LlamaLike:
    """What families of Llama's shape differ in; a family that reads a fact in another way is a subclass.

    spec: the parts of their layers. attention_bias, mlp_bias: whether the family has a field of that name (others
    ignore one). qkv_bias: a bias on query, key and value always. qk_norm: query and key heads are normalised.
    window: "never", "always" where a `sliding_window` is set, or "by layer", as `use_sliding_window` and
    `layer_types` or `max_window_layers` say. partial_rotary: it has `partial_rotary_factor`. dropout: it has
    `resid_pdrop`. activation_field: the field that names the activation. scalings: of rotary positions, that are here
    as the family has them. The rest is what holds where a configuration does not say.
    """

    spec: Callable[[], TransformerLayerSpec] = llama_spec
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: str = "never"
    partial_rotary: bool = False
    dropout: bool = False
    activation_field: str = "hidden_act"
    scalings: tuple[str, ...] = SCALINGS
    activation: str = "silu"
    tied: bool = False
    epsilon: float = 1e-6
    rope_theta: float = 10000.0
    groups: int | None = None
    head_size: int | None = None
    sliding_window: int | None = None

    def family(self, architecture: str, rows: tuple[Row, ...] = LLAMA_ROWS) -> Family:
        """The entry of the table of families."""
        return Family(
            architecture=architecture,
            model=self.model,
            rules=self.rules,
            fields=self.fields,
            rows=rows,
        )

    def model(self, facts: Facts, params_dtype: torch.dtype) -> HuggingFaceModel:
        """Our form of the fields."""
        return HuggingFaceModel(
            config=TransformerConfig(**self.config(facts), params_dtype=params_dtype),
            transformer_layer_spec=self.spec(),
            vocab_size=facts["vocab_size"],
            max_sequence_length=facts["max_position_embeddings"],
            share_embeddings_and_output_weights=facts.get("tie_word_embeddings", self.tied),
        )

    def config(self, facts: Facts) -> dict[str, Any]:
        """The arguments of TransformerConfig."""
        hidden = facts["hidden_size"]
        heads = facts["num_attention_heads"]
        activation = facts.get(self.activation_field, self.activation)
        return {
            "num_layers": facts["num_hidden_layers"],
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": facts.get("num_key_value_heads", self.groups) or heads,
            "ffn_hidden_size": facts["intermediate_size"],
            # head_dim may be null in config.json, which means the same as absent
            "kv_channels": facts.get("head_dim", self.head_size) or hidden // heads,
            "normalization": "RMSNorm",
            "layernorm_epsilon": facts.get("rms_norm_eps", self.epsilon),
            "qk_layernorm": self.qk_norm,
            "activation_func": ACTIVATIONS.get(activation, activation),
            "gated_linear_unit": True,
            "add_bias_linear": self._biases(facts) == (True, True),
            "add_qkv_bias": self.qkv_bias,
            "hidden_dropout": facts.get("resid_pdrop", 0.0) if self.dropout else 0.0,
            "attention_dropout": facts.get("attention_dropout", 0.0),
            "windows": self.windows(facts),
            "init_method_std": facts.get("initializer_range", 0.02),
        } | self.rotary(facts)

    def rotary(self, facts: Facts) -> dict[str, Any]:
        """The arguments of TransformerConfig that concern rotary positions."""
        rotary = one_rotary(facts, self.rope_theta)
        return {
            "rotary_base": rotary.base,
            "rotary_percent": rotary.percent,
            "rotary_scaling": rotary.scaling,
        }

    def rotary_rules(self, facts: Facts) -> Rules:
        """What is refused of rotary positions: kinds of scaling that are not here, a part of the head that is odd."""
        yield from rotary_rules(facts, self.scalings)
        ropes = [facts.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
        supported = all(rope_kind(rope) in self.scalings for rope in ropes)
        percent = 1.0
        if supported:
            percent = one_rotary(facts, self.rope_theta).percent
        yield (
            self.partial_rotary or percent == 1.0,
            f"partial_rotary_factor={percent} is not this family's; remove it",
        )

    def rules(self, facts: Facts) -> Rules:
        """What a configuration may say that is not here."""
        yield from self.rotary_rules(facts)
        if self.window == "always":
            kinds = set(facts.get("layer_types") or ()) - {"sliding_attention"}
            yield (
                not kinds,
                f"layer_types names {sorted(kinds)}: this family's layers all have the window; remove it",
            )
        if self.window == "by layer":
            slides = "sliding_attention" in (facts.get("layer_types") or ())
            yield (
                not (slides and facts.get("use_sliding_window") is False),
                "use_sliding_window=False contradicts layer_types, which names sliding_attention; change one of them",
            )
        # TransformerConfig has one add_bias_linear for all of them
        attention, mlp = self._biases(facts)
        flags = f"attention_bias={attention}" + (f" with mlp_bias={mlp}" if self.mlp_bias else "")
        remedy = "attention_bias=False"
        if self.mlp_bias:
            remedy = "both True or both False"
        yield (
            attention == mlp,
            f"{flags} is not supported: here all linear layers of attention and MLP have a bias, or none has; "
            f"what can be represented is {remedy}",
        )
        if self.dropout:
            yield from one_dropout(facts)

    def _biases(self, facts: Facts) -> tuple[bool, bool]:
        """Whether (all four projections of the attention, the MLP) have biases."""
        attention = self.attention_bias and bool(facts.get("attention_bias", False))
        return attention, self.mlp_bias and bool(facts.get("mlp_bias", False))

    def windows(self, facts: Facts) -> Windows:
        """How many tokens a token sees in each layer; see `TransformerConfig.windows`."""
        if self.window == "never":
            return None
        layers = facts["num_hidden_layers"]
        window = facts.get("sliding_window", self.sliding_window)
        if self.window == "always":
            if window is not None:
                return (window,) * layers
            return None
        slides = bool(facts.get("use_sliding_window", False))
        kinds = self.layer_types(facts)
        if not slides or window is None:
            return None
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def layer_types(self, facts: Facts) -> list[str]:
        """Of each layer "sliding_attention" or "full_attention", where a window is by layer."""
        by_layer = facts.get("layer_types")
        # as transformers' Qwen2Config: its default, and the first layers see everything
        first = facts.get("max_window_layers", 28)
        if by_layer is not None:
            return list(by_layer)
        layers = facts["num_hidden_layers"]
        return [
            "sliding_attention" if number >= first else "full_attention" for number in range(layers)
        ]

    def fields(self, model: HuggingFaceModel) -> Fields:
        """What the family would say of a model of ours."""
        config = model.config
        biased = model.config.add_bias_linear
        fields = {
            "num_hidden_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.groups,
            "intermediate_size": config.ffn,
            "head_dim": config.head_size,
            "rms_norm_eps": config.layernorm_epsilon,
            self.activation_field: activation_name(config),
            "attention_dropout": config.attention_dropout,
            "initializer_range": config.init_method_std,
            "vocab_size": model.vocab_size,
            "max_position_embeddings": model.max_sequence_length,
            "tie_word_embeddings": model.share_embeddings_and_output_weights,
        }
        if self.attention_bias:
            fields["attention_bias"] = biased
        if self.mlp_bias:
            fields["mlp_bias"] = biased
        if self.dropout:
            fields |= {"resid_pdrop": config.hidden_dropout, "embd_pdrop": config.hidden_dropout}
        if self.partial_rotary:
            fields["partial_rotary_factor"] = config.rotary.percent
        return fields | self.window_fields(config.windows) | self.rotary_fields(config)

    def rotary_fields(self, config: TransformerConfig) -> Fields:
        """The fields of rotary positions."""
        return rope_fields(config.rotary)

    def window_fields(self, windows: Windows) -> Fields:
        """The fields of windows."""
        window = next((window for window in windows or () if window is not None), None)
        if self.window == "never":
            return {}
        if self.window == "always":
            return {"sliding_window": window}
        fields: Fields = {"use_sliding_window": window is not None, "sliding_window": window}
        if windows is not None:
            fields["layer_types"] = layer_types_of(windows)
        return fields


def layer_types_of(windows: tuple[int | None, ...]) -> list[str]:
    """ "sliding_attention" for a layer with a window, else "full_attention"."""
    return ["full_attention" if window is None else "sliding_attention" for window in windows]
