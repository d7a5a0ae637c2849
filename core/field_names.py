"""A configuration that a program makes: a name that it lacks is told with the nearest, or ours for theirs; a text or
a fraction where a number belongs is told too."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError
from difflib import get_close_matches
from functools import cache, wraps
from inspect import isclass, signature
from operator import index
from types import NoneType
from typing import Any, ClassVar, SupportsIndex, TypeVar, get_args, get_type_hints

from core.elsewhere import ELSEWHERE, REMARKS, TORCHTITAN

# of difflib: "hiden_size" is like hidden_size, "new_field" like nothing
ALIKE = 0.7
Made = TypeVar("Made", bound=Callable[..., Any])


class UnknownName(ValueError, TypeError):
    """A name that is no field's; a TypeError too, as Python's own is."""


class AnswersArguments:
    """A class whose constructor is asked for arguments of others' classes of its kind."""

    _their_arguments: ClassVar[Mapping[str, str]] = {}
    """Their argument -> what there is in its place."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raises `UnknownName`: one of theirs is given."""
        if theirs := [name for name in kwargs if name in cls._their_arguments]:
            said = "; ".join(f"{name}: {cls._their_arguments[name]}" for name in theirs)
            raise UnknownName(f"{cls.__name__} has no {said}")
        return super().__new__(cls)


def tells_names(
    section: str = "", remedies: Mapping[str, str] | None = None, *, fields_of: type | None = None
) -> Callable[[Made], Made]:
    """Decorate a dataclass, or a function that makes one: a name that it lacks is an `UnknownName`.

    What is no number in place of one, and a float in place of an int, are a ValueError; numpy's integers become
    Python's.

    section: the part of a run whose fields these are. remedies: name -> what is said of it. fields_of: the dataclass
    that a function makes. Nothing else changes: signature, fields, pickles, `dataclasses.replace`.
    """

    def decorated(made: Made) -> Made:
        call = made.__init__ if isclass(made) else made

        @wraps(call)
        def told(*values: Any, **arguments: Any) -> Any:
            if wrong := list(_wrong_values(fields_of or made, arguments)):
                raise ValueError(f"{made.__name__}: {'; '.join(wrong)}")
            try:
                return call(*values, **_with_integers(fields_of or made, arguments))
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

        def refuse(self: Any, name: str, value: Any) -> None:
            fields = list(signature(made).parameters)
            if type(self) is not made and name not in fields:  # a subclass's own
                object.__setattr__(self, name, value)
                return
            remedy = f"dataclasses.replace(config, {name}=...) makes another"
            if name not in fields:
                remedy = (remedies or {}).get(name) or _remedy(name, section, fields, made.__name__)
            raise FrozenInstanceError(
                f"cannot assign to field {name!r}: a {type(self).__name__} stays as it was made; {remedy}"
            )

        if "__setattr__" in vars(made):  # a frozen dataclass's
            made.__setattr__ = refuse  # type: ignore[method-assign]
        made.__init__ = told  # type: ignore[method-assign]
        return made

    return decorated


@cache
def _kinds(fields_of: Any) -> dict[str, tuple[type, bool]]:
    """Name -> (int, float or torch's dtype; whether None is one of its values), of the fields of these kinds."""
    kinds: dict[str, tuple[type, bool]] = {}
    for name, hint in get_type_hints(fields_of).items():
        types = set(get_args(hint) or (hint,))
        is_optional = NoneType in types
        types -= {NoneType}
        if types and types <= {int, float}:
            kinds[name] = (float if float in types else int, is_optional)
        elif {kind.__name__ for kind in types if isclass(kind)} == {"dtype"}:
            kinds[name] = (types.pop(), is_optional)
    return kinds


def _wrong_values(fields_of: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    """What is said of each argument that is no number, or no dtype, where the field is one."""
    kinds = _kinds(fields_of)
    for name, value in arguments.items():
        if name not in kinds:
            continue
        kind, is_optional = kinds[name]
        # a text that YAML or a command line left (`1e-3` is one to YAML), a size that a division made
        is_wrong = isinstance(value, (str, bool)) or (value is None and not is_optional)
        if kind is int:
            is_wrong = is_wrong or isinstance(value, float)
        if not is_wrong:
            continue
        given = "None" if value is None else f"{value!r} is a {type(value).__name__}"
        yield f"{name}={given}; give {name}={_meant(value, kind)}"


def _with_integers(fields_of: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """numpy's integers as Python's, which seeds, files of JSON and shapes want."""
    kinds = _kinds(fields_of)
    return {
        name: index(value)
        if kinds.get(name, (None,))[0] is int and isinstance(value, SupportsIndex)
        else value
        for name, value in arguments.items()
    }


def _meant(value: Any, kind: type) -> str:
    """What was meant; where that is open, what is wanted."""
    if kind not in (int, float):
        # not imported here: configurations are read without it
        torch = sys.modules["torch"]
        is_dtype = isinstance(getattr(torch, str(value), None), kind)
        return f"torch.{value}" if is_dtype else "a torch.dtype, as torch.bfloat16"
    if isinstance(value, (str, float)):
        return _as_number(value, kind)
    return "an integer" if kind is int else "a number"


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
    if remark := REMARKS.get(name):
        return remark
    if close := get_close_matches(name, fields, n=1, cutoff=ALIKE):
        return f"did you mean {close[0]}?"
    return f"help({subject}) lists its names"
