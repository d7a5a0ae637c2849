"""Every field of a run by its flat name ("optimizer.lr"): its kind, default and meaning; and values of that kind."""

import ast
import inspect
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# the text that stands for no value, where a field may have none
NONE = "None"

# what no field's integer reaches, seeds included
_LARGEST = 1 << 64

_TYPES = {"flag": "true | false", "texts": "list of texts", "table": "table of texts and numbers"}
_NEEDED = {
    "integer": "an integer",
    "number": "a number",
    "flag": "true or false (no quotes)",
    "text": "a text",
    "texts": "a list of texts",
    "table": "a table of texts and numbers (of a flag: NAME VALUE NAME VALUE ...)",
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a run.

    name: "optimizer.lr"; of the run itself, "device". kind: "integer", "number", "flag", "text", "texts" or "table".
    optional: it may be None. choices: the values it may have, where these are few. owner: the class that has it.
    """

    name: str
    kind: str
    optional: bool
    choices: tuple[Any, ...]
    default: Any
    owner: type

    @property
    def section(self) -> str:
        """The part of the run that it is in; "" for the run itself."""
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """Its name within its part."""
        return self.name.rpartition(".")[2]

    @property
    def help(self) -> str:
        """Its docstring, in one line; read from the source at first use, so that judging values does not wait."""
        return docs_of(self.owner).get(self.key, "")

    @property
    def type(self) -> str:
        """Its kind in words: "integer or None", "llama | gpt2"."""
        text = " | ".join(map(str, self.choices)) or _TYPES.get(self.kind, self.kind)
        if self.optional:
            return f"{text} or {NONE}"
        return text

    def read(self, value: Any) -> Any:
        """`value`, from Python, TOML or a command line, as the dataclass holds it.

        An integer is a number too, a text a list of one; the text "None" is None where that is allowed, and a list or
        table of nothing.
        Raises ValueError: it is of another kind; the message tells the value and what is needed.
        """
        if self.optional and (value is None or value == NONE):
            return None
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        try:
            return _READ[self.kind](value)
        except _WrongKind as wrong:
            needed = _NEEDED[self.kind] + (f" or {NONE}" if self.optional else "") + " is needed"
            needed += f"; use {value:.0f}" if self.kind == "integer" and _is_whole(value) else ""
            raise ValueError(f"{self.name}={brief(value)} is {wrong}, {needed}") from None

    def from_text(self, text: str) -> Any:
        """The value that a TOML file would have for `text` of a command line; a text where it is none of the kind."""
        if self.kind in ("integer", "number"):
            return number_of(text)
        if self.kind == "flag":
            return {"true": True, "false": False}.get(text.lower(), text)
        return text


def brief(value: Any) -> str:
    """`value` as Python writes it; an integer with more digits than anybody reads as its power of ten."""
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return f"{'-' if value < 0 else ''}10**{math.log10(abs(value)):.0f}"
    return repr(value)


class _WrongKind(Exception):
    """What a value is instead."""


def _kind_of_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    names = {int: "an integer", float: "a decimal number", str: "text", NoneType: "nothing"}
    names |= {list: "a list", tuple: "a list", dict: "a table"}
    return names.get(type(value), f"a {type(value).__name__}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _read_integer(value: Any) -> int:
    # True is an int to Python, and to nobody who writes a configuration; numpy's integers are Integral
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise _WrongKind(_kind_of_value(value))
    value = int(value)
    if abs(value) >= _LARGEST:
        raise _WrongKind("beyond 64 bits")
    return value


def _read_number(value: Any) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise _WrongKind(_kind_of_value(value))
    try:
        number = float(value)
    except OverflowError:
        raise _WrongKind("not finite") from None
    if not math.isfinite(number):
        raise _WrongKind("not finite")
    return number


def _read_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _WrongKind(_kind_of_value(value))
    return value


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongKind(_kind_of_value(value))
    return value


def _read_texts(value: Any) -> tuple[str, ...]:
    """Numbers in a list become texts: weights of a blend."""
    if isinstance(value, str):
        if value == NONE:
            return ()
        return (value,)
    if not isinstance(value, list | tuple):
        raise _WrongKind(_kind_of_value(value))
    items = []
    for item in value:
        if isinstance(item, os.PathLike):
            items.append(os.fspath(item))
        else:
            items.append(item)
    if strange := [
        item for item in items if isinstance(item, bool) or not isinstance(item, str | int | float)
    ]:
        raise _WrongKind(f"a list with {strange[0]!r}")
    return tuple(str(item) for item in items)


def _table(value: Any) -> dict[str, str | float]:
    """Integers become numbers; true and false texts, as on a command line."""
    if isinstance(value, str) and value == NONE:
        return {}
    if not isinstance(value, Mapping):
        raise _WrongKind(_kind_of_value(value))
    table: dict[str, str | float] = {}
    for key, item in value.items():
        if not isinstance(key, str) or not isinstance(item, str | int | float):
            raise _WrongKind(f"a table with {key!r}: {item!r}")
        if isinstance(item, bool):
            table[key] = str(item).lower()
        elif isinstance(item, str):
            table[key] = item
        else:
            table[key] = _read_number(item)
    return table


_READ = {
    "integer": _read_integer,
    "number": _read_number,
    "flag": _read_flag,
    "text": _read_text,
    "texts": _read_texts,
    "table": _table,
}


def number_of(text: str) -> int | float | str:
    """The number that a text reads as, or the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def pairs_of(names_and_values: tuple[str, ...]) -> dict[str, Any] | tuple[str, ...]:
    """The table that `name value name value ...` on a command line stands for; those words where one is left over."""
    if len(names_and_values) % 2:
        return names_and_values
    pairs = zip(names_and_values[::2], names_and_values[1::2], strict=True)
    return {name: number_of(value) for name, value in pairs}


def _kind_of_annotation(hint: Any) -> tuple[str, bool, tuple[Any, ...]]:
    """(kind, optional, choices) of an annotation."""
    args = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (arg for arg in args if arg is not NoneType)
        # X | None is the only union that fields have
        kind, _, choices = _kind_of_annotation(inner)
        return kind, True, choices
    if get_origin(hint) is Literal:
        return _kind_of_annotation(type(args[0]))[0], False, args
    if hint == tuple[str, ...]:
        return "texts", False, ()
    if get_origin(hint) is dict:
        return "table", False, ()
    return {int: "integer", float: "number", bool: "flag", str: "text"}[hint], False, ()


@cache
def docs_of(cls: type) -> dict[str, str]:
    """field -> the docstring below it, in one line; empty without the source (a frozen program)."""
    try:
        (tree,) = ast.parse(inspect.getsource(cls)).body
    except (OSError, TypeError, ValueError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(after, ast.Expr)
        ):
            text = None
            if isinstance(after.value, ast.Constant):
                text = after.value.value
            if isinstance(text, str):
                docs[node.target.id] = " ".join(text.split())
    return docs


def _fields_in(cls: type, prefix: str = "") -> Iterator[Field]:
    hints = get_type_hints(cls)
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            yield from _fields_in(hints[field.name], f"{field.name}.")
            continue
        kind, optional, choices = _kind_of_annotation(hints[field.name])
        if field.default_factory is MISSING:
            default = field.default
        else:
            default = field.default_factory()
        yield Field(
            name=prefix + field.name,
            kind=kind,
            optional=optional,
            choices=choices,
            default=default,
            owner=cls,
        )


def fields_of(cls: type) -> dict[str, Field]:
    """Flat name -> field, in order, of a dataclass of dataclasses."""
    return {field.name: field for field in _fields_in(cls)}


def flatten(
    nested: Mapping[str, Any], fields_by_name: Mapping[str, Field]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """({"optimizer": {"lr": 1}} as {"optimizer.lr": 1}, what is said about names that are there twice).

    A field that holds a table stays whole. The first one of two values of a name is kept.
    """
    flat: dict[str, Any] = {}
    written: dict[str, str] = {}
    twice = []
    sections = {field.section for field in fields_by_name.values()} - {""}

    def walk(keys: tuple[str, ...], value: Any) -> None:
        name = ".".join(keys)
        if (
            isinstance(value, Mapping)
            and name not in fields_by_name
            and (value or not keys or name in sections)
        ):
            for key, inner in value.items():
                walk((*keys, str(key)), inner)
            return
        statement = f"{'.'.join(_quoted(key) for key in keys)} = {brief(value)}"
        # {"optimizer": {"lr": 1}, "optimizer.lr": 2}: nobody knows which one is meant
        if name in flat:
            twice.append(
                f"{name} is given twice, as {written[name]} and as {statement}; leave one out"
            )
        else:
            flat[name], written[name] = value, statement

    walk((), nested)
    return flat, tuple(twice)


def _quoted(key: str) -> str:
    if "." in key:
        return f'"{key}"'
    return key
