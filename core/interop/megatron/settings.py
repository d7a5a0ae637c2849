"""Fields of Megatron's configurations of which one value alone is here."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def refuse_others(settings: Any, instead: Mapping[str, str]) -> None:
    """Raise ValueError: a field of a dataclass has another value than its default; instead: what to do, by field."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name in instead and value != field.default:
            raise ValueError(
                f"{type(settings).__name__}: {field.name}={value} is not here; {instead[field.name]}"
            )
