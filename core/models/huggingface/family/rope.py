"""Rotary positions in a configuration: `rope_parameters` of today; `rope_theta` and `rope_scaling` of older files."""

from collections.abc import Mapping
from typing import Any

from core.models.huggingface.facts import Facts
from core.models.huggingface.family.family import Fields, Rules
from core.transformer.transformer_config import RotaryConfig, RotaryScaling

SCALINGS = ("default", "linear", "llama3")
_FACTORS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_OF_YARN = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)


def rope_kind(rope: Mapping[str, Any]) -> str:
    """The name of a scaling; "default" where there is none."""
    kind: str = rope.get("rope_type", rope.get("type", "default"))
    return kind


def rotary_config(
    rope: Mapping[str, Any], base: float, percent: float, facts: Facts
) -> RotaryConfig:
    """Our form of one set of rope parameters; base and percent hold where it does not say them."""
    typed = None
    if rope_kind(rope) != "default":
        # Llama 3's scaling starts from the model's positions where no others are said
        factors = {"original_max_position_embeddings": facts["max_position_embeddings"], **rope}
        if rope_kind(rope) == "yarn":
            # as in transformers, 0 and null say nothing
            factors = {name: value for name, value in factors.items() if value}
        typed = RotaryScaling(
            kind=rope_kind(rope),
            **{name: factors[name] for name in _names(rope_kind(rope)) if name in factors},
        )
    return RotaryConfig(
        base=rope.get("rope_theta", base),
        percent=rope.get("partial_rotary_factor", percent),
        scaling=typed,
    )


def one_rotary(facts: Facts, base: float) -> RotaryConfig:
    """Of a model whose layers all rotate alike; `base` is the family's own."""
    older_base = facts.get("rope_theta", base)
    older_percent = facts.get("partial_rotary_factor", 1.0)
    return rotary_config(whole_rope(facts), older_base, older_percent, facts)


def whole_rope(facts: Facts) -> dict[str, Any]:
    """What a model whose layers all rotate alike says in both forms."""
    today = facts.get("rope_parameters") or {}
    return {**(facts.get("rope_scaling") or {}), **today}


def rotary_rules(facts: Facts, known: tuple[str, ...] = SCALINGS) -> Rules:
    """One set of parameters, of a scaling that is known."""
    today = facts.get("rope_parameters") or {}
    older = facts.get("rope_scaling") or {}
    yield (
        not (today and older) or today == older,
        f"rope_parameters={today} and rope_scaling={older} contradict each other; leave one out",
    )
    for rope in (today, older):
        yield is_known_scaling(rope, known)


def is_known_scaling(
    rope: Mapping[str, Any], known: tuple[str, ...] = SCALINGS
) -> tuple[bool, str]:
    """A rule: the scaling is one of those that a family may have."""
    kind = rope_kind(rope)
    return kind in known, f"rope_type={kind!r} is not supported; {', '.join(known)} are"


def rope_fields(rotary: RotaryConfig) -> Fields:
    """In the older form, which every version of transformers reads."""
    scaling = rotary.scaling
    return {
        "rope_theta": rotary.base,
        "rope_scaling": None if scaling is None else scaling_fields(scaling),
    }


def scaling_fields(scaling: RotaryScaling) -> Fields:
    """A scaling as `rope_scaling` says it."""
    names = ("factor",) if scaling.kind == "linear" else _names(scaling.kind)
    values = {name: getattr(scaling, name) for name in names}
    # null and absent are one
    said = {name: value for name, value in values.items() if value is not None}
    return {"rope_type": scaling.kind} | said


def _names(kind: str) -> tuple[str, ...]:
    return _OF_YARN if kind == "yarn" else _FACTORS
