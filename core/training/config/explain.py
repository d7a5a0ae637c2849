"""The settings of a run, field by field: as a table with origins and meanings, and as a commented file."""

import shutil
import textwrap
from collections.abc import Iterator

from core.training.config.fields import NONE, Field, brief
from core.training.config.messages.unused import unused
from core.training.config.rules import batch_solved, in_world
from core.training.config.run import PARTS, Problem, between, known_fields
from core.training.config.sources import Merged
from core.training.config.toml_files import literal

_WIDTH = 110  # of the template's lines


def explained(merged: Merged, world_size: int) -> tuple[str, int]:
    """(the table, how the batch is made up for `world_size` ranks, and all mistakes; their number)."""
    sections = dict(merged.draft.sections)
    world_problems: list[Problem] = []
    # a part with mistakes of its own is not in the draft
    if "parallel" in sections:
        sections["parallel"], broken_rules = in_world(sections["parallel"], world_size)
        world_problems = [Problem("", message) for _, message in broken_rules]
    problems = [*merged.problems, *world_problems, *between(sections)]
    lines = [*_changed(merged), *_table(merged), ""]
    if not problems:
        lines += _memory_lines(sections)
    lines.append(_explain_batch(sections, world_size))
    if problems:
        heading = "1 mistake:"
        if len(problems) > 1:
            heading = f"{len(problems)} mistakes:"
        lines += ["", heading, *(f"  {merged.with_origin(problem)}" for problem in problems)]
    return "\n".join(lines), len(problems)


def _changed(merged: Merged) -> Iterator[str]:
    """What was changed, and what of it has no effect: the first thing that is asked."""
    values = merged.draft.values
    fields_by_name = known_fields()
    changed = [name for name in fields_by_name if merged.origin[name] != "default"]
    yield f"{len(changed)} settings are not from their defaults{':' if changed else ''}"
    for name in changed:
        yield f"  {name} = {_value_text(values[name])}  ({merged.origin[name]})"
    if not merged.problems:
        defaults = {name: field.default for name, field in fields_by_name.items()}
        typed = [name for name in changed if merged.origin[name].startswith("--")]
        yield from (f"note: {line}" for line in unused(values, defaults, typed))
    yield ""


def _memory_lines(sections: dict) -> Iterator[str]:
    """Bytes of weights, gradients and states on the fullest rank, where the model and its tokenizer are here."""
    try:
        from core.training.config.memory import fullest_rank

        state = fullest_rank(sections)
    except (ImportError, ValueError, OSError) as error:
        yield f"memory per rank: not known here ({str(error).splitlines()[0]})"
        return
    parts = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "host": state.host,
    }
    told = " + ".join(f"{name} {size / 2**20:,.1f}" for name, size in parts.items() if size)
    total = sum(parts.values()) / 2**20
    yield f"memory per rank: {told} = {total:,.1f} MiB on the fullest one, before activations"


def _table(merged: Merged) -> Iterator[str]:
    """Field, value, origin, docstring; the last one wrapped in its column where the terminal has room."""
    # one row per field, its value as TOML would have it
    fields_by_name = list(known_fields().values())
    rows = [(field, _value_text(merged.draft.values[field.name])) for field in fields_by_name]
    # fields of no part first, as TOML needs it
    rows.sort(key=lambda row: row[0].section != "")

    # column widths; the help text takes the remaining columns of the terminal
    name_width = max(len(field.key) for field in fields_by_name) + 2
    value_width = min(28, max(len(text) for _, text in rows))
    origin_width = max(len(merged.origin[field.name]) for field in fields_by_name)
    left_width = name_width + value_width + origin_width
    help_width = shutil.get_terminal_size((160, 24)).columns - left_width - 6
    section = ""
    for field, text in rows:
        if field.section != section:
            section = field.section
            yield f"[{section}]"
        origin = merged.origin[field.name]
        columns = (
            f"  {field.key:<{name_width - 2}}  {text:<{value_width}}  {origin:<{origin_width}}  "
        )
        # a narrow terminal: the help goes below
        if help_width < 30:
            yield columns.rstrip()
            yield from textwrap.wrap(
                field.help, left_width, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
            continue
        first, *following = textwrap.wrap(field.help, help_width) or [""]
        yield (columns + first).rstrip()
        yield from (" " * (left_width + 6) + line for line in following)


def _value_text(value: object) -> str:
    if value is None:
        return NONE
    if isinstance(value, _WRITABLE):
        return literal(value)
    return brief(value)


_WRITABLE = (str, bool, float, list, tuple, dict)


def _explain_batch(sections: dict, world_size: int) -> str:
    """How the batch is made up, or why it is not."""
    missing = [name for name in ("training", "parallel") if name not in sections]
    plural = "" if world_size == 1 else "s"
    ranks = f"{world_size} rank{plural}: "
    if missing:
        return f"{ranks}the batch cannot be solved before {' and '.join(missing)} is right"
    parallel = sections["parallel"]
    if parallel.data is None or parallel.data * parallel.model_ranks != world_size:
        return f"{ranks}the batch cannot be solved, the layout does not fit this many ranks"
    try:
        return ranks + batch_solved(sections["training"], parallel)
    except ValueError as error:
        return ranks + str(error).removeprefix("the batch: ")


def template() -> str:
    """A TOML file with every field, its docstring, kind and default, all of it comments: a run of defaults."""
    lines = [
        "# A run: python -m core.pretrain --config THIS.toml",
        "# Every field with its default; uncomment what is to be otherwise. Flags win over the file.",
        "# python -m core.training.config --explain THIS.toml tells what comes out of it.",
    ]
    section = None
    for field in sorted(known_fields().values(), key=lambda field: field.section != ""):
        if field.section != section:
            section = field.section
            if section:
                lines += ["", *_comment(_first_line(PARTS[section])), f"[{section}]"]
        lines += [
            "",
            *_comment(field.help),
            *_comment(f"{field.type}; default: {_value_text(field.default)}"),
        ]
        lines.append(_setting(field))
    return "\n".join(lines) + "\n"


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _setting(field: Field) -> str:
    """The default as a line of the file, which changes nothing as long as it is a comment."""
    return f"# {field.key} = {literal(field.default)}"
