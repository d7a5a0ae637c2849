"""Fields of Megatron's configurations of which one value alone is here."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def refuse_others(settings: Any, instead: Mapping[str, str]) -> None:
    """Raise ValueError: a field of a dataclass has another value than its default; instead: what to do, by field.

    None, False, 0 and nothing are one value.
    """
    for field in fields(settings):
        if field.name not in instead:
            continue
        value = getattr(settings, field.name)
        if value != field.default and (value or field.default):
            raise ValueError(
                f"{type(settings).__name__}: {field.name}={value} is not here; {instead[field.name]}"
            )
