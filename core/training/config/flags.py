"""The command line of a run: a flag per field, read by tyro as texts; nothing is judged before all is known."""

import contextlib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Annotated, Any

from core.extras import install
from core.training.config.fields import NONE, Field, number_of, pairs_of
from core.training.config.messages.names import unknown
from core.training.config.run import PARTS, Problem
from core.training.config.toml_files import literal
from core.training.log.leaving import say_to_reader

_CONFIG = "config"
_MANY = ("texts", "table")
# what `--help` tells
COMMON = (
    "model.preset",
    "model.huggingface",
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.ffn_hidden_size",
    "lora.rank",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.sequence_parallel",
    "pipeline.schedule",
    "data_parallel.zero_stage",
    "data.train",
    "data.valid",
    "data.tokenizer",
    "data.sequence_length",
    "training.objective",
    "dpo.beta",
    "training.train_steps",
    "training.global_batch_size",
    "training.micro_batch_size",
    "training.recompute",
    "training.eval_interval",
    "training.output",
    "optimizer.lr",
    "optimizer.lr_schedule",
    "checkpoint.directory",
    "checkpoint.every",
    "device",
)


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
    args: Sequence[str],
    fields_by_name: Mapping[str, Field],
    *,
    defaults: Mapping[str, Any],
    description: str = "",
) -> Flags:
    """The flags among `args`. --help prints those that most runs need with `defaults`, --help-all every field with
    its docstring, and leaves (SystemExit).

    Raises ImportError: tyro is missing.
    """
    if "--help" in args or "-h" in args:
        # torchrun starts many processes with the same flags; one of them answers
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say_to_reader(short_help(fields_by_name, defaults, description))
        raise SystemExit(0)
    # tyro's own help tells every field
    args = ["--help" if word == "--help-all" else word for word in args]
    accepted, typed, problems = _scan_arguments(args, fields_by_name)
    parsed, rest = _parsed_by_tyro(accepted, fields_by_name, defaults, description)
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
    problems += _stray_words(rest, fields_by_name)
    return Flags(values=values, typed=typed, files=parsed.config, problems=tuple(problems))


def short_help(
    fields_by_name: Mapping[str, Field], defaults: Mapping[str, Any], description: str
) -> str:
    """`description`, then flag, default and docstring of each of `COMMON`; of long docstrings the first sentence."""
    width = min(110, shutil.get_terminal_size((110, 24)).columns)
    indent = " " * 6
    head = "The flags that most runs need; --help-all tells every one:"
    lines = [description.strip(), "", head, "  --config FILE.toml"]
    lines.append(f"{indent}Read the run from this file; a later one wins, flags win over all.")
    for name in COMMON:
        spec = fields_by_name[name]
        default = defaults[name]
        value = "" if _is_switch(spec) else f" {_placeholder(spec)}"
        if default in (None, (), False):
            default_text = ""
        else:
            default_text = f"  (default: {literal(default)})"
        if len(spec.help) <= 150:
            help_ = spec.help
        else:
            help_ = f"{spec.help.split('. ')[0].rstrip('.')}."
        lines.append(f"  {flag_of(name)}{value}{default_text}")
        lines += textwrap.wrap(help_, width, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines).lstrip("\n") + "\n"


def _scan_arguments(
    args: Sequence[str], fields_by_name: Mapping[str, Field]
) -> tuple[list[str], dict[str, str], list[Problem]]:
    """(arguments without flags that lack a value, or have one too many; name -> flag as typed; those mistakes)."""
    accepted: list[str] = []
    typed: dict[str, str] = {}
    problems: list[Problem] = []
    if "--" in args:
        problems.append(Problem("", "'--' is a stray word among the flags; leave it out"))
    args = [word for word in args if word != "--"]
    owner = _Owner("", "text", 0)  # of the words that follow
    # the last word is followed by a flag that is none, so that a value it lacks is missed
    for word, after in zip(args, [*args, "--"][1:], strict=True):
        if not word.startswith("--"):
            owner = replace(owner, count=owner.count + 1)
            if owner.kind == "twice":  # told with the flag
                continue
            if wrong := owner.refuses(word):
                problems.append(Problem("", wrong))
            else:
                accepted.append(word)
            continue
        head, equals, _ = word.partition("=")
        name, switch = _names_of_flag(head, fields_by_name)
        kind = _kind_of_flag(name, switch, fields_by_name)
        owner = _Owner(head, kind or "unknown", int(bool(equals)))
        if kind is not None and (switch in typed or name in typed):
            problems.append(
                Problem("", _given_twice_message(head, typed.get(switch) or typed[name], kind))
            )
            owner = replace(owner, kind="twice")
        elif kind is None:
            accepted.append(word)
        elif _is_switch(fields_by_name.get(switch)):
            owner = _Owner(head, "switch", 0, _switch_words(switch))
            if equals:
                problems.append(
                    Problem(
                        "", f"{word}: a value is one word too many; use {_switch_words(switch)}"
                    )
                )
            else:
                accepted.append(word)
                typed[switch] = head
        elif kind == "flag" and (switch != name or (not equals and _is_flag(after))):
            # a switch that may also be left to a default: alone it is true, with no- it is false
            owner = _Owner(head, "switch", 0, _switch_words(switch))
            accepted.append(f"{flag_of(switch)}={'true' if switch == name else 'false'}")
            typed[switch] = head
        elif switch != name and name != _CONFIG:
            accepted.append(word)  # --optimizer.no-lr: nobody's
        elif not equals and _is_flag(after):
            more = ""
            if kind in _MANY:
                more = f" ..., or {head} {NONE} for an empty one"
            problems.append(Problem("", f"{head} has no value; give {head} VALUE{more}"))
        else:
            accepted.append(word)
            typed |= {name: head} if name in fields_by_name else {}
    return accepted, typed, problems


def _kind_of_flag(name: str, switch: str, fields_by_name: Mapping[str, Field]) -> str | None:
    """Of which kind a flag's values are; None: there is no such flag."""
    if switch in fields_by_name:
        return fields_by_name[switch].kind
    if name == _CONFIG:
        return "config"
    return None


def _names_of_flag(head: str, fields_by_name: Mapping[str, Field]) -> tuple[str, str]:
    """(the flat name of a flag, the one without `no-`)."""
    section, _, key = head.removeprefix("--").replace("-", "_").rpartition(".")
    name = f"{section}.{key}" if section else key
    return name, name if name in fields_by_name else f"{section}.{key.removeprefix('no_')}"


def _given_twice_message(head: str, earlier: str, kind: str) -> str:
    """The message for a flag that is there again: nobody knows which one is meant."""
    both = head if head == earlier else f"{earlier} and {head}"
    if kind in _MANY:
        return f"{both} is given twice; give all its values after one {head}"
    if head == earlier:
        return f"{both} is given twice; leave one out"
    return f"{both} are both given; leave one out"


@dataclass(frozen=True)
class _Owner:
    """The flag whose values come next. kind: its field's, or switch, config, twice, unknown. count: of values."""

    head: str
    kind: str
    count: int
    switch: str = ""

    def refuses(self, word: str) -> str:
        """Why `word` is no value of this flag; empty: it is one, or tyro will tell."""
        if self.kind == "switch":
            return f"{self.head} takes no value, {word!r} is one word too many; use {self.switch}"
        if not self.head or (self.kind == "config" and self.count > 1):
            is_file = word.endswith(".toml") or self.kind == "config"
            return f"{word!r} belongs to no flag; give {'--config' if is_file else '--NAME'} {word}"
        if self.kind not in (*_MANY, "unknown", "config") and self.count > 1:
            return f"{self.head} takes one value, {word!r} is one too many; leave it out"
        return ""


def _is_flag(word: str) -> bool:
    """Whether a word begins with a dash and is no number."""
    return word.startswith("-") and word != "-" and isinstance(number_of(word), str)


def _is_switch(field: Field | None) -> bool:
    return field is not None and field.kind == "flag" and not field.optional


def _switch_words(name: str) -> str:
    section, _, key = name.rpartition(".")
    return f"{flag_of(name)} or {flag_of(f'{section}.no_{key}')}"


def _stray_words(rest: Sequence[str], fields_by_name: Mapping[str, Field]) -> list[Problem]:
    """What tyro could not place; the values of an unknown flag go with it."""
    problems = []
    flag = ""
    for word in rest:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            name = flag.removeprefix("--").replace("-", "_")
            problems.append(Problem(name, unknown(name, fields_by_name)))
        elif not flag:
            problems.append(Problem("", f"{word!r} belongs to no flag; give --NAME {word}"))
    return problems


def _parsed_by_tyro(
    args: Sequence[str],
    fields_by_name: Mapping[str, Field],
    defaults: Mapping[str, Any],
    description: str,
) -> tuple[Any, list[str]]:
    try:
        import tyro
    except ImportError as error:
        raise ImportError(f"the command line needs tyro: {install('train')}") from error

    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(
                _mirror_dataclass(tyro, fields_by_name, defaults),
                args=list(args),
                description=description,
                return_unknown_args=True,
                console_outputs=os.environ.get("LOCAL_RANK", "0") == "0",
            )
    except SystemExit as end:
        # what the scan did not see; without tyro's frame
        if end.code and messages.getvalue():
            print(
                "error:",
                " ".join(re.sub(r"[^\x20-\x7e]", " ", messages.getvalue()).split()),
                file=sys.stderr,
            )
        raise


def _mirror_dataclass(
    tyro: Any, fields_by_name: Mapping[str, Field], defaults: Mapping[str, Any]
) -> type:
    """A dataclass of dataclasses with the same flags, all of them texts and without rules."""

    def entries(section: str) -> list[tuple[str, Any, Any]]:
        in_section = [
            (name, spec) for name, spec in fields_by_name.items() if spec.section == section
        ]
        return [_mirror_field(tyro, spec, defaults[name]) for name, spec in in_section]

    entries_by_section: list[tuple[str, Any, Any]] = [
        (
            _CONFIG,
            Annotated[
                tuple[str, ...],
                tyro.conf.UseAppendAction,
                tyro.conf.arg(
                    help="Read the run from this file; a later one wins, flags win over all.",
                    metavar="FILE.toml",
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
            (
                section,
                Annotated[inner, tyro.conf.arg(help=first_line)],
                field(default_factory=inner),
            )
        )
    return make_dataclass("Run", entries_by_section, kw_only=True)


def _mirror_field(tyro: Any, spec: Field, default: Any) -> tuple[str, Any, Any]:
    help_ = {
        "help": spec.help,
        "help_behavior_hint": f"(default: {NONE if default is None else literal(default)})",
    }
    if _is_switch(spec):
        return spec.key, Annotated[bool, tyro.conf.arg(**help_)], field(default=bool(default))
    help_["metavar"] = _placeholder(spec)
    if spec.kind in _MANY:
        return spec.key, Annotated[tuple[str, ...], tyro.conf.arg(**help_)], field(default=())
    return spec.key, Annotated[str, tyro.conf.arg(**help_)], field(default="")


def _placeholder(spec: Field) -> str:
    """What stands for a value in a help text."""
    if spec.choices:
        return "{" + ",".join(map(str, spec.choices)) + "}"
    placeholders = {"texts": "TEXT ...", "table": "NAME VALUE ..."}
    return placeholders.get(spec.kind, spec.type.replace(" or ", "|").replace(" | ", "|").upper())
