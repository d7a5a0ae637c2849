"""TOML files of a run: read with the line of every value, written with every value."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from core.training.config.fields import NONE, Field, flatten

_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]#]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_QUOTES = re.compile(r"\"\"\"|'''")


def read_toml(path: str | Path, known: Mapping[str, Field]) -> tuple[dict[str, Any], dict[str, int]]:
    """(flat name -> value, flat name -> line) of a file. Raises ValueError: it cannot be read, or is no TOML."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = flatten(tomllib.loads(text), known)
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist; `python -m core.training.config --template {path}` writes one"
        ) from None
    except (OSError, ValueError) as error:  # UnicodeDecodeError and TOMLDecodeError among them
        raise ValueError(f"{path} cannot be read as TOML: {getattr(error, 'strerror', None) or error}") from None
    return values, lines_of(text, values)


def lines_of(text: str, names: Iterable[str]) -> dict[str, int]:
    """flat name -> line, counted from 1; of the table that holds it, where it has no line of its own."""
    found: dict[str, int] = {}
    for number, name in _keys(text):
        found.setdefault(name, number)
    at = {}
    for name in names:
        outer = name
        while outer and outer not in found:
            outer = outer.rpartition(".")[0]
        if outer:
            at[name] = found[outer]
    return at


def _keys(text: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every table and key; lines within a text of several lines are none."""
    table, quote = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        inside = bool(quote)
        if not inside and line.lstrip().startswith("#"):
            continue
        for mark in _QUOTES.findall(line):
            quote = mark if not quote else "" if mark == quote else quote
        if inside:
            continue
        if header := _HEADER.match(line):
            table = _plain(header[1])
            yield number, table
        elif key := _KEY.match(line):
            yield number, f"{table}.{_plain(key[1])}" if table else _plain(key[1])


def _plain(dotted: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in dotted.split("."))


def literal(value: Any) -> str:
    """`value` as TOML writes it; None as the text that stands for it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)} = {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    if value is None:
        return literal(NONE)
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def write_toml(fields: Iterable[Field], values: Mapping[str, Any]) -> str:
    """A file with every field and its value, part by part."""
    lines, part = [], ""
    for field in sorted(fields, key=lambda field: field.part != ""):  # those of no part come first, as TOML wants it
        if field.part != part:
            part = field.part
            lines += ["", f"[{part}]"]
        lines.append(f"{field.key} = {literal(values[field.name])}")
    return "\n".join(lines).lstrip("\n") + "\n"
