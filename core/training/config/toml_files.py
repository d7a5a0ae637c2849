"""TOML files of a run: read with the line of every value, written with every value."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core.training.config.fields import NONE, Field, flatten
from core.training.config.messages.toml_mistakes import explained

_CLOSES = re.compile(r"[]}]|\"\"\"|'''")
# lines that might end a setting of several lines, and do not
_TRIES = 200


class Read(NamedTuple):
    """A file: flat name -> value, flat name -> line, and what is said about names that are there twice."""

    values: dict[str, Any]
    lines: dict[str, int]
    duplicates: tuple[str, ...]


def read_toml(path: str | Path, fields_by_name: Mapping[str, Field]) -> Read:
    """What a file says. Raises ValueError: it cannot be read, or is no TOML."""
    text = ""
    try:
        # some editors begin a file with a mark
        text = Path(path).read_text(encoding="utf-8-sig")
        values, duplicates = flatten(tomllib.loads(text), fields_by_name)
        lines = lines_of(text, values)
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist; `python -m core.training.config --template {path}` writes one"
        ) from None
    except RecursionError:
        raise ValueError(f"{path} cannot be read as TOML: it is nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} cannot be read as TOML: {explained(text, error)}") from None
    except (OSError, ValueError) as error:
        # UnicodeDecodeError among them
        raise ValueError(
            f"{path} cannot be read as TOML: {getattr(error, 'strerror', None) or error}"
        ) from None
    return Read(values, lines, tuple(f"{path}: {message}" for message in duplicates))


def lines_of(text: str, names: Iterable[str]) -> dict[str, int]:
    """flat name -> line, counted from 1, where its setting begins; without those that are not found for sure."""
    line_of: dict[str, int] = {}
    table: tuple[str, ...] = ()
    for number, statement, parsed in _statements(text):
        header = statement.lstrip().startswith("[")
        paths = [((() if header else table) + path) for path in _key_paths(parsed)]
        if header:
            table = paths[-1]
        for path in paths:
            line_of.setdefault(".".join(path), number)
    return {name: line_of[name] for name in names if name in line_of}


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(first line, text, what it says by itself) of every header and setting: as many lines as are TOML together."""
    start = 1
    pending = ""
    tries = 0
    for number, line in enumerate(text.split("\n"), 1):
        pending += line + "\n"
        # a list or text over many lines: only a line that closes something can end it
        if number > start and not _CLOSES.search(line):
            continue
        try:
            parsed = tomllib.loads(pending)
        except ValueError:  # it goes on in the next line
            tries += 1
            if tries > _TRIES:
                return
            continue
        yield start, pending, parsed
        start = number + 1
        pending = ""


def _key_paths(parsed: Mapping[str, Any], outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys that lead to every table and value, outer ones first."""
    for key, value in parsed.items():
        yield (*outer, key)
        if isinstance(value, dict):
            yield from _key_paths(value, (*outer, key))


def literal(value: Any) -> str:
    """`value` as TOML writes it; None as the text that stands for it."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{literal(key)} = {literal(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    if value is None:
        return literal(NONE)
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def write_toml(
    fields: Iterable[Field],
    values: Mapping[str, Any],
    path: str | Path | None = None,
    comment: str = "",
) -> str:
    """A file with every field and its value, part by part; written to `path` where one is given."""
    lines = [f"# {comment}"] if comment else []
    section = ""
    # fields of no section come first: in TOML they could not follow a section
    for field in sorted(fields, key=lambda field: field.section != ""):
        if field.section != section:
            section = field.section
            lines += ["", f"[{section}]"]
        lines.append(f"{field.key} = {literal(values[field.name])}")
    text = "\n".join(lines).lstrip("\n") + "\n"
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    return text
