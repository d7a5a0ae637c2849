"""SmolLM3: Llama, some of whose layers do not rotate (NoPE)."""

from dataclasses import dataclass
from typing import Any

from core.models.huggingface.facts import Facts
from core.models.huggingface.family.family import Fields, Rules
from core.models.huggingface.family.llama_like import LlamaLike
from core.models.huggingface.family.rope import one_rotary, rope_fields
from core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class SmolLM3(LlamaLike):
    """`no_rope_layers` holds 1 for a layer that rotates, and 0 for one that does not; so it is in its files."""

    def rotary(self, facts: Facts) -> dict[str, Any]:
        """A layer that does not rotate has None."""
        rotates = self._rotates(facts)
        if all(rotates):
            return super().rotary(facts)
        rotary = one_rotary(facts, self.rope_theta)
        return {"rotary_per_layer": tuple(rotary if one else None for one in rotates)}

    def _rotates(self, facts: Facts) -> list[bool]:
        layers = facts["num_hidden_layers"]
        interval = facts.get("no_rope_layer_interval", 4)
        by_layer = facts.get("no_rope_layers")
        if by_layer is None:
            return [(number + 1) % interval != 0 for number in range(layers)]
        return [bool(one) for one in by_layer[:layers]]

    def rules(self, facts: Facts) -> Rules:
        """Those of Llama's relatives, and a fact for each layer."""
        yield from super().rules(facts)
        by_layer = facts.get("no_rope_layers")
        layers = facts["num_hidden_layers"]
        yield (
            by_layer is None or len(by_layer) >= layers,
            f"no_rope_layers names {len(by_layer or ())} layers, num_hidden_layers={layers}; give one for each",
        )

    def layer_types(self, facts: Facts) -> list[str]:
        """Where they are not said, the layers that do not rotate have the window."""
        # of Qwen2's configuration, whose name its files carry; no code reads it
        facts.get("max_window_layers")
        by_layer = facts.get("layer_types")
        if by_layer is not None:
            return list(by_layer)
        return ["full_attention" if one else "sliding_attention" for one in self._rotates(facts)]

    def rotary_fields(self, config: TransformerConfig) -> Fields:
        """Every layer is said: an interval could not say all."""
        per_layer = config.rotary_per_layer or (config.rotary,) * config.num_layers
        rotary = next((one for one in per_layer if one is not None), config.rotary)
        return rope_fields(rotary) | {"no_rope_layers": [int(one is not None) for one in per_layer]}
