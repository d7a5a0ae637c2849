"""A configuration that a program makes: a name that it lacks is told with the nearest, or ours for theirs; a text or
a fraction where a number belongs is told too."""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache, wraps
from inspect import isclass, signature
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

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

    A text in place of a number, and a float in place of an int, are a ValueError.

    section: the part of a run whose fields these are. remedies: name -> what is said of it. fields_of: the dataclass
    that a function makes. Nothing else changes: signature, fields, pickles, `dataclasses.replace`.
    """

    def decorated(made: Made) -> Made:
        call = made.__init__ if isclass(made) else made

        @wraps(call)
        def told(*values: Any, **arguments: Any) -> Any:
            if wrong_numbers := list(_wrong_numbers(fields_of or made, arguments)):
                raise ValueError(f"{made.__name__}: {'; '.join(wrong_numbers)}")
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


@cache
def _number_fields(fields_of: Any) -> dict[str, type]:
    """Name -> int or float, of the fields that take a number, or None, and nothing else."""
    numbers: dict[str, type] = {}
    for name, hint in get_type_hints(fields_of).items():
        types = set(get_args(hint) or (hint,)) - {NoneType}
        if types and types <= {int, float}:
            numbers[name] = float if float in types else int
    return numbers


def _wrong_numbers(fields_of: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    """What is said of each argument that is a text, or a float where the field is an int."""
    # a text that YAML or a command line left (`1e-3` is one to YAML), a size that a division made
    if not any(isinstance(value, (str, float)) for value in arguments.values()):
        return
    for name, kind in _number_fields(fields_of).items():
        value = arguments.get(name)
        if isinstance(value, str) or (kind is int and isinstance(value, float)):
            meant = _as_number(value, kind)
            yield f"{name}={value!r} is a {type(value).__name__}; give {name}={meant}"


def _as_number(value: str | float, kind: type) -> str:
    """What was meant; where that is open, what is wanted."""
    try:
        number = float(value)
    except ValueError:
        return "an integer" if kind is int else "a number"
    if kind is float:
        return f"{number:g}"
    return str(int(number)) if number.is_integer() else "an integer"


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
