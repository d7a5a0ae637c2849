"""Gemma 3, the text model: local layers with a window and rotary positions of their own, global ones between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from core.models.huggingface.facts import Facts
from core.models.huggingface.family.family import Fields, HuggingFaceModel, Rules
from core.models.huggingface.family.llama_like import LlamaLike, Windows, layer_types_of
from core.models.huggingface.family.rope import (
    is_known_scaling,
    rope_fields,
    rotary_config,
    scaling_fields,
)
from core.transformer.transformer_config import RotaryConfig, TransformerConfig

_GLOBAL = "full_attention"
_LOCAL = "sliding_attention"
# where a configuration does not say
_BASES = {_GLOBAL: 1_000_000.0, _LOCAL: 10_000.0}


@dataclass(frozen=True, kw_only=True)
class Gemma3(LlamaLike):
    """Norms multiply by 1 + weight, embeddings by sqrt(hidden size), scores by query_pre_attn_scalar ** -0.5."""

    def config(self, facts: Facts) -> dict[str, Any]:
        """The arguments of TransformerConfig."""
        return super().config(facts) | {
            "layernorm_zero_centered_gamma": True,
            "embedding_multiplier": sqrt(facts["hidden_size"]),
            "softmax_scale": facts.get("query_pre_attn_scalar", 256) ** -0.5,
        }

    def rules(self, facts: Facts) -> Rules:
        """Those of Llama's relatives; soft caps, a kind of layer or of attention that is not here."""
        yield from super().rules(facts)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            cap = facts.get(name)
            yield (
                cap is None,
                f"{name}={cap} is not supported: nothing here caps scores or logits; use null",
            )
        both = facts.get("use_bidirectional_attention", False)
        yield (
            not both,
            f"use_bidirectional_attention={both} is not supported: attention is causal; use False",
        )
        kinds = self.layer_types(facts)
        yield (
            set(kinds) <= {_GLOBAL, _LOCAL},
            f"layer_types names {sorted(set(kinds) - {_GLOBAL, _LOCAL})}; {_GLOBAL} and {_LOCAL} are known",
        )
        window = facts.get("sliding_window", self.sliding_window)
        yield (
            window is not None or _LOCAL not in kinds,
            f"sliding_window={window} with layers of {_LOCAL}; give the tokens that those see",
        )

    def layer_types(self, facts: Facts) -> list[str]:
        """Where they are not said, every sixth layer is global, or as `sliding_window_pattern` says."""
        by_layer = facts.get("layer_types")
        pattern = facts.get("sliding_window_pattern", 6)
        # written beside layer_types, read by nobody
        facts.get("_sliding_window_pattern")
        if by_layer is not None:
            return list(by_layer)
        return [
            _LOCAL if (number + 1) % pattern else _GLOBAL
            for number in range(facts["num_hidden_layers"])
        ]

    def windows(self, facts: Facts) -> Windows:
        """Local layers have the window."""
        window = facts.get("sliding_window", self.sliding_window)
        return tuple(window if kind == _LOCAL else None for kind in self.layer_types(facts))

    def rotary(self, facts: Facts) -> dict[str, Any]:
        """One kind of rotary positions for local layers, one for global ones."""
        of_kind = {
            kind: rotary_config(rope, _BASES[kind], 1.0, facts)
            for kind, rope in _ropes(facts).items()
        }
        return {"rotary_per_layer": tuple(of_kind[kind] for kind in self.layer_types(facts))}

    def rotary_rules(self, facts: Facts) -> Rules:
        """Both kinds have a scaling that is known, and are said once."""
        today = facts.get("rope_parameters") or {}
        older = facts.get("rope_scaling")
        # a configuration object of transformers has both names for one
        yield (
            not (today and older) or today == older,
            f"rope_parameters={today} and rope_scaling={older} contradict each other; leave one out",
        )
        known = [today[name] for name in _BASES if today.get(name) is not None]
        yield (
            all(isinstance(rope, Mapping) for rope in known) and today.keys() <= _BASES.keys(),
            f"rope_parameters={today} is of one kind of layers; give those of {_GLOBAL} and of {_LOCAL}",
        )
        if today.keys() <= _BASES.keys():
            for rope in _ropes(facts).values():
                yield is_known_scaling(rope)
                percent = rope.get("partial_rotary_factor", 1.0)
                yield (
                    percent == 1.0,
                    f"partial_rotary_factor={percent} is not this family's; remove it",
                )

    def fields(self, model: HuggingFaceModel) -> Fields:
        """What the family would say of a model of ours."""
        config = model.config
        if config.softmax_scale is not None:
            scale = config.softmax_scale
        else:
            scale = config.head_size**-0.5
        return super().fields(model) | {"query_pre_attn_scalar": whole(scale**-2)}

    def window_fields(self, windows: Windows) -> Fields:
        """The window, and which layers have it."""
        if windows is None:
            return {}
        window = next((window for window in windows if window is not None), None)
        return {"sliding_window": window, "layer_types": layer_types_of(windows)}

    def rotary_fields(self, config: TransformerConfig) -> Fields:
        """In the older form, which every version of transformers reads: local layers are never scaled there."""
        windows = config.windows or (None,) * config.num_layers
        per_layer = config.rotary_per_layer or ()
        # a kind that no layer is of keeps its default
        of_kind = {kind: RotaryConfig(base=base) for kind, base in _BASES.items()}
        for window, rotary in zip(windows, per_layer, strict=False):
            if rotary is not None:
                of_kind[_GLOBAL if window is None else _LOCAL] = rotary
        scaling = of_kind[_GLOBAL].scaling
        return rope_fields(of_kind[_GLOBAL]) | {
            "rope_scaling": None if scaling is None else scaling_fields(scaling),
            "rope_local_base_freq": of_kind[_LOCAL].base,
        }


def _ropes(facts: Facts) -> dict[str, Mapping[str, Any]]:
    """Kind of layer -> its parameters, of today's form or of the older one."""
    today = facts.get("rope_parameters") or {}
    older = facts.get("rope_scaling") or {}
    bases = {
        _GLOBAL: facts.get("rope_theta", _BASES[_GLOBAL]),
        _LOCAL: facts.get("rope_local_base_freq", _BASES[_LOCAL]),
    }
    rope_of_kind = {kind: today.get(kind) or {} for kind in _BASES}
    if not today:
        rope_of_kind[_GLOBAL] = older
    return {kind: {"rope_theta": bases[kind], **rope} for kind, rope in rope_of_kind.items()}


def whole(number: float) -> float:
    """The integer that a number is but for rounding."""
    nearest = round(number)
    if abs(number - nearest) < 1e-9 * number:
        return nearest
    return number
