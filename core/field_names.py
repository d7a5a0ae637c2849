"""A configuration that a program makes, with a name that it lacks: the nearest is told, or ours for theirs."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import isclass, signature
from typing import Any, TypeVar

from core.elsewhere import ELSEWHERE, TORCHTITAN

# of difflib: "hiden_size" is like hidden_size, "new_field" like nothing
ALIKE = 0.7
Made = TypeVar("Made", bound=Callable[..., Any])


class UnknownName(ValueError, TypeError):
    """A name that is no field's; a TypeError too, as Python's own is."""


def tells_names(
    section: str = "", remedies: Mapping[str, str] | None = None, *, fields_of: type | None = None
) -> Callable[[Made], Made]:
    """Decorate a dataclass, or a function that makes one: a name that it lacks is an `UnknownName`.

    section: the part of a run whose fields these are. remedies: name -> what is said of it. fields_of: the dataclass
    that a function makes. Nothing else changes: signature, fields, pickles, `dataclasses.replace`.
    """

    def decorated(made: Made) -> Made:
        call = made.__init__ if isclass(made) else made

        @wraps(call)
        def told(*values: Any, **arguments: Any) -> Any:
            try:
                return call(*values, **arguments)
            except TypeError:
                subject, given = made.__name__, values
                if isclass(made):
                    subject, given = type(values[0]).__name__, values[1:]
                fields = list(signature(fields_of or made).parameters)
                wrong = [
                    f"no {name} ({(remedies or {}).get(name) or _remedy(name, section, fields, subject)})"
                    for name in arguments
                    if name not in fields
                ]
                if wrong:
                    raise UnknownName(f"{subject} has {', '.join(wrong)}") from None
                if given:
                    example = f"{fields[0]}={given[0]!r}"
                    raise UnknownName(f"{subject} takes values by name, as {example}") from None
                raise

        if not isclass(made):
            return told  # type: ignore[return-value]
        made.__init__ = told  # type: ignore[method-assign]
        return made

    return decorated


def _remedy(name: str, section: str, fields: list[str], subject: str) -> str:
    ours = TORCHTITAN.get(f"{section}.{name}") or ELSEWHERE.get(name, "")
    part, _, key = ours.partition(".")
    if part == section and key in fields:
        return f"did you mean {key}?"
    if ours:
        return f"in a run it is {ours}"
    if close := get_close_matches(name, fields, n=1, cutoff=ALIKE):
        return f"did you mean {close[0]}?"
    return f"help({subject}) lists its names"
