"""What a run is told, field by field: as a table with origins and meanings, and as a commented file to start from."""

import shutil
import textwrap
from collections.abc import Iterator

from core.training.config.fields import NONE, Field, brief
from core.training.config.rules import batch_solved, in_world
from core.training.config.run import PARTS, Problem, between, known_fields
from core.training.config.sources import Merged
from core.training.config.toml_files import literal

_WIDTH = 110  # of the template's lines


def explained(merged: Merged, world_size: int) -> tuple[str, int]:
    """(the table, the batch solved for `world_size` ranks and everything that is wrong; how many mistakes)."""
    parts = dict(merged.draft.parts)
    wrong: list[Problem] = []
    if "parallel" in parts:
        parts["parallel"], broken = in_world(parts["parallel"], world_size)
        wrong = [Problem("", message) for _, message in broken]
    problems = [*merged.problems, *wrong, *between(parts)]
    lines = [*_table(merged), "", _batch(parts, world_size)]
    if problems:
        many = f"{len(problems)} mistakes:" if len(problems) > 1 else "1 mistake:"
        lines += ["", many, *(f"  {merged.told(problem)}" for problem in problems)]
    return "\n".join(lines), len(problems)


def _table(merged: Merged) -> Iterator[str]:
    """Field, value, origin, docstring; the last one wrapped in its column where the terminal has room."""
    known = list(known_fields().values())
    shown = [(field, _shown(merged.draft.values[field.name])) for field in known]
    name = max(len(field.key) for field in known) + 2
    value = min(28, max(len(text) for _, text in shown))
    origin = max(len(merged.origin[field.name]) for field in known)
    room = shutil.get_terminal_size((160, 24)).columns - name - value - origin - 6
    part = ""
    for field, text in sorted(shown, key=lambda row: row[0].part != ""):
        if field.part != part:
            part = field.part
            yield f"[{part}]"
        left = f"  {field.key:<{name - 2}}  {text:<{value}}  {merged.origin[field.name]:<{origin}}  "
        if room < 30:
            yield left.rstrip()
            yield from textwrap.wrap(
                field.help, name + value + origin, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
            continue
        first, *more = textwrap.wrap(field.help, room) or [""]
        yield (left + first).rstrip()
        yield from (" " * (name + value + origin + 6) + line for line in more)


def _shown(value: object) -> str:
    return NONE if value is None else literal(value) if isinstance(value, _WRITABLE) else brief(value)


_WRITABLE = (str, bool, float, list, tuple, dict)


def _batch(parts: dict, world_size: int) -> str:
    """How the batch is made up, or why it is not."""
    missing = [name for name in ("training", "parallel") if name not in parts]
    ranks = f"{world_size} rank{'s' if world_size != 1 else ''}: "
    if missing:
        return f"{ranks}the batch cannot be solved before {' and '.join(missing)} is right"
    if parts["parallel"].data is None or parts["parallel"].data * parts["parallel"].model_ranks != world_size:
        return f"{ranks}the batch cannot be solved, the layout does not fit this many ranks"
    try:
        return ranks + batch_solved(parts["training"], parts["parallel"])
    except ValueError as error:
        return ranks + str(error).removeprefix("the batch: ")


def template() -> str:
    """A TOML file with every field, its docstring, kind and default, all of it comments: a run of defaults."""
    lines = [
        "# A run: python examples/pretrain_gpt.py --config THIS.toml",
        "# Every field with its default; uncomment what is to be otherwise. Flags win over the file.",
        "# python -m core.training.config --explain THIS.toml tells what comes out of it.",
    ]
    part = None
    for field in sorted(known_fields().values(), key=lambda field: field.part != ""):
        if field.part != part:
            part = field.part
            lines += ["", *_comment(_first_line(PARTS[part])), f"[{part}]"] if part else []
        lines += ["", *_comment(field.help), *_comment(f"{field.type}; default: {_shown(field.default)}")]
        lines.append(_setting(field))
    return "\n".join(lines) + "\n"


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _setting(field: Field) -> str:
    """The default as a line of the file, which changes nothing as long as it is a comment."""
    return f"# {field.key} = {literal(field.default)}"
