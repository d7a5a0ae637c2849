"""The command line of a run: a flag per field, read by tyro as texts; nothing is judged before all is known."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any

from core.extras import install
from core.training.config.fields import NONE, Field, number_of, pairs_of
from core.training.config.names import unknown
from core.training.config.run import PARTS, Problem
from core.training.config.toml_files import literal

_CONFIG = "config"
_MANY = ("texts", "table")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What a command line says.

    values: flat name -> raw value, of the flags that are there. typed: flat name -> the flag as it was typed.
    files: of --config.
    """

    values: dict[str, Any]
    typed: dict[str, str]
    files: tuple[str, ...]
    problems: tuple[Problem, ...]


def flag_of(name: str) -> str:
    """The flag of a field: "optimizer.lr_schedule" is "--optimizer.lr-schedule"."""
    return "--" + name.replace("_", "-")


def read_flags(
    args: Sequence[str], fields_by_name: Mapping[str, Field], *, defaults: Mapping[str, Any], description: str = ""
) -> Flags:
    """The flags among `args`. --help prints every field with its docstring and `defaults`, and leaves (SystemExit).

    Raises ImportError: tyro is missing.
    """
    accepted, typed, problems = _scan(args, fields_by_name)
    parsed, rest = _parsed(accepted, fields_by_name, defaults, description)
    values: dict[str, Any] = {}
    for name in typed:
        spec = fields_by_name[name]
        raw = getattr(getattr(parsed, spec.section) if spec.section else parsed, spec.key)
        if spec.kind in _MANY and raw == (NONE,):
            values[name] = NONE
        elif spec.kind == "table":
            values[name] = pairs_of(raw)
        else:
            values[name] = spec.from_text(raw) if isinstance(raw, str) else raw
    problems += _strays(rest, fields_by_name)
    return Flags(values=values, typed=typed, files=parsed.config, problems=tuple(problems))


def _scan(
    args: Sequence[str], fields_by_name: Mapping[str, Field]
) -> tuple[list[str], dict[str, str], list[Problem]]:
    """(arguments without flags that lack a value, or have one too many; name -> flag as typed; those mistakes)."""
    accepted: list[str] = []
    typed: dict[str, str] = {}
    problems = [Problem("", "'--' is a stray word among the flags; leave it out")] if "--" in args else []
    args = [word for word in args if word != "--"]
    for word, after in zip(args, [*args, "--"][1:], strict=True):
        head, equals, _ = word.partition("=")
        section, _, key = head.removeprefix("--").replace("-", "_").rpartition(".")
        name = f"{section}.{key}" if section else key
        switch = name if name in fields_by_name else f"{section}.{key.removeprefix('no_')}"
        kind = fields_by_name[switch].kind if switch in fields_by_name else "text" if name == _CONFIG else None
        if not word.startswith("--") or kind is None:
            accepted.append(word)
        elif _is_switch(fields_by_name.get(switch)):
            if equals:
                problems.append(Problem("", f"{word}: a value is one word too many; use {_switch(switch)}"))
            else:
                accepted.append(word)
                typed[switch] = head
        elif kind == "flag" and (switch != name or (not equals and _is_flag(after))):
            # a switch that may also be left to a default: alone it is true, with no- it is false
            accepted.append(f"{flag_of(switch)}={'true' if switch == name else 'false'}")
            typed[switch] = head
        elif switch != name and name != _CONFIG:
            accepted.append(word)  # --optimizer.no-lr: nobody's
        elif not equals and _is_flag(after):
            more = f" ..., or {head} {NONE} for an empty one" if kind in _MANY else ""
            problems.append(Problem("", f"{head} has no value; give {head} VALUE{more}"))
        else:
            accepted.append(word)
            typed |= {name: head} if name in fields_by_name else {}
    return accepted, typed, problems


def _is_flag(word: str) -> bool:
    """Whether a word begins with a dash and is no number."""
    return word.startswith("-") and word != "-" and isinstance(number_of(word), str)


def _is_switch(field: Field | None) -> bool:
    return field is not None and field.kind == "flag" and not field.optional


def _switch(name: str) -> str:
    section, _, key = name.rpartition(".")
    return f"{flag_of(name)} or {flag_of(f'{section}.no_{key}')}"


def _strays(rest: Sequence[str], fields_by_name: Mapping[str, Field]) -> list[Problem]:
    """What tyro could not place; the values of an unknown flag go with it."""
    problems, flag = [], ""
    for word in rest:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            name = flag.removeprefix("--").replace("-", "_")
            problems.append(Problem(name, unknown(name, fields_by_name)))
        elif not flag:
            problems.append(Problem("", f"{word!r} belongs to no flag; give --NAME {word}"))
    return problems


def _parsed(
    args: Sequence[str], fields_by_name: Mapping[str, Field], defaults: Mapping[str, Any], description: str
) -> tuple[Any, list[str]]:
    try:
        import tyro
    except ImportError as error:
        raise ImportError(f"the command line needs tyro: {install('train')}") from error

    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(
                _mirror(tyro, fields_by_name, defaults),
                args=list(args),
                description=description,
                return_unknown_args=True,
                console_outputs=os.environ.get("LOCAL_RANK", "0") == "0",
            )
    except SystemExit as end:
        if end.code and messages.getvalue():  # what the scan did not see; without tyro's frame
            print("error:", " ".join(re.sub(r"[^\x20-\x7e]", " ", messages.getvalue()).split()), file=sys.stderr)
        raise


def _mirror(tyro: Any, fields_by_name: Mapping[str, Field], defaults: Mapping[str, Any]) -> type:
    """A dataclass of dataclasses with the same flags, all of them texts and without rules."""

    def entries(section: str) -> list[tuple[str, Any, Any]]:
        return [
            _entry(tyro, fields_by_name[n], defaults[n])
            for n in fields_by_name
            if fields_by_name[n].section == section
        ]

    entries_by_section: list[tuple[str, Any, Any]] = [
        (
            _CONFIG,
            Annotated[
                tuple[str, ...],
                tyro.conf.UseAppendAction,
                tyro.conf.arg(
                    help="Read the run from this file; a later one wins, flags win over all.", metavar="FILE.toml"
                ),
            ],
            field(default=()),
        ),
        *entries(""),
    ]
    for section, kind in PARTS.items():
        inner = make_dataclass(kind.__name__, entries(section), kw_only=True)
        first_line = (kind.__doc__ or "").partition("\n")[0]
        entries_by_section.append(
            (section, Annotated[inner, tyro.conf.arg(help=first_line)], field(default_factory=inner))
        )
    return make_dataclass("Run", entries_by_section, kw_only=True)


def _entry(tyro: Any, spec: Field, default: Any) -> tuple[str, Any, Any]:
    help_ = {"help": spec.help, "help_behavior_hint": f"(default: {NONE if default is None else literal(default)})"}
    if _is_switch(spec):
        return spec.key, Annotated[bool, tyro.conf.arg(**help_)], field(default=bool(default))
    placeholders = {"texts": "TEXT ...", "table": "NAME VALUE ..."}
    help_["metavar"] = placeholders.get(spec.kind, spec.type.replace(" or ", "|").replace(" | ", "|").upper())
    if spec.choices:
        help_["metavar"] = "{" + ",".join(map(str, spec.choices)) + "}"
    if spec.kind in _MANY:
        return spec.key, Annotated[tuple[str, ...], tyro.conf.arg(**help_)], field(default=())
    return spec.key, Annotated[str, tyro.conf.arg(**help_)], field(default="")
