"""A run from its sources: defaults, the script's own, TOML files, flags. They are merged first and judged once."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from core import __version__
from core.training.config.fields import flatten
from core.training.config.flags import read_flags
from core.training.config.messages.megatron import OTHER_DEFAULTS, is_script
from core.training.config.messages.names import in_the_runs_names
from core.training.config.messages.unused import unused
from core.training.config.run import (
    ConfigError,
    Draft,
    Problem,
    RunConfig,
    between,
    drafted,
    known_fields,
)
from core.training.config.texts import with_token_files
from core.training.config.toml_files import literal, read_toml, write_toml
from core.training.log.leaving import let_the_first_rank_end, listed, say_mistake

# each says all facts of a model
_WHOLE_MODELS = ("model.preset", "model.huggingface", "model.build")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A run, and where each value is from.

    origin: flat name -> "default", "script", "run.toml:12", "--optimizer.lr", or the field that it follows.
    """

    run: RunConfig
    origin: dict[str, str]

    def lines(self) -> list[str]:
        """`optimizer.lr = 0.0003  (run.toml:3)` of every value that is no default."""
        return [
            f"{name} = {literal(value)}  ({self.origin[name]})"
            for name, value in self.run.resolved().items()
            if self.origin[name] != "default" and not self._is_off(name, value)
        ]

    def _is_off(self, name: str, value: Any) -> bool:
        """Whether it is a fact of a folder or preset that says what the model does not have."""
        if self.origin[name] not in _WHOLE_MODELS:
            return False
        of_experts = name.startswith("model.moe_")
        return value in (None, False, (), 0) or (of_experts and not self._has_experts())

    def _has_experts(self) -> bool:
        return bool(self.run.resolved()["model.num_moe_experts"])

    def unused(self) -> list[str]:
        """What was set and has no effect beside the other settings."""
        defaults = {name: field.default for name, field in known_fields().items()}
        typed = {name for name, source in self.origin.items() if source.startswith("--")}
        return unused(self.run.flat(), defaults, typed)

    def to_toml(self, path: str | Path | None = None) -> str:
        """As `RunConfig.to_toml`, but a field that follows another one is left undecided ("None").

        It follows again where the file is read, also beside another value of that other field. What a checkpoint
        says stays: who reads the file may not have that.
        """
        followed = known_fields().keys() - {"checkpoint.weights"}
        values = {
            n: None if self.origin[n] in followed else value for n, value in self.run.flat().items()
        }
        return write_toml(
            known_fields().values(), values, path, comment=f"written by paracore {__version__}"
        )


@dataclass(frozen=True, kw_only=True)
class Merged:
    """All sources in one: a draft of the run with the mistakes of sources and parts, and where each value is from."""

    draft: Draft
    origin: dict[str, str]
    problems: tuple[Problem, ...]

    def loaded(self) -> Loaded:
        """The run. Raises ConfigError with all mistakes, those between parts too."""
        if self.problems:
            raise ConfigError((*self.problems, *between(self.draft.sections)))
        return Loaded(run=self.draft.run(), origin=self.origin)

    def with_origin(self, problem: Problem) -> str:
        """The mistake, and where the values that it speaks of are from."""
        where = []
        if problem.name in self.origin:
            where.append(self.origin[problem.name])
        for name in known_fields():
            section, _, key = name.rpartition(".")
            if (
                section == problem.name
                and f" {key}=" in problem.text
                and self.origin[name] != "default"
            ):
                where.append(f"{key}: {self.origin[name]}")
        if where:
            return f"{problem.text} ({', '.join(where)})"
        return problem.text


def merge(
    args: Sequence[str], *, defaults: Mapping[str, Any] | None = None, description: str = ""
) -> Merged:
    """Dataclass defaults < the model of `checkpoint.weights` < `defaults` (flat names) < `--config` files, the last
    one first < flags. Nothing is judged on the way: a value that a later source replaces is no mistake.

    Raises SystemExit: after --help. ImportError: tyro is missing.
    """
    fields_by_name = known_fields()
    values_by_name = dict(defaults or {})
    origin = dict.fromkeys(defaults or {}, "script")
    shown = {name: values_by_name.get(name, spec.default) for name, spec in fields_by_name.items()}
    flags = read_flags(args, fields_by_name, defaults=shown, description=description)
    problems = []
    for path in flags.files:
        try:
            values, lines, duplicates = read_toml(path, fields_by_name)
        except ValueError as error:
            problems.append(Problem("", str(error)))
            continue
        problems += [Problem("", message) for message in duplicates]
        values_by_name |= values
        origin |= {name: f"{path}:{lines[name]}" if name in lines else path for name in values}
    values_by_name |= flags.values
    origin |= flags.typed
    # last, for all sources may name the checkpoint; but what they say of the model is not overwritten
    of_weights = _said_by_weights(values_by_name)
    values_by_name |= of_weights
    origin |= dict.fromkeys(of_weights, "checkpoint.weights")
    draft = drafted(values_by_name)
    origin |= draft.derived
    return Merged(
        draft=draft,
        origin={name: "default" for name in fields_by_name} | origin,
        problems=(*problems, *flags.problems, *draft.problems),
    )


def run_of(config: Mapping[str, Any] | str | Path) -> RunConfig:
    """As `RunConfig.from_dict`, or `from_toml` of a path, where `checkpoint.weights` says the rest of the model."""
    if isinstance(config, Mapping):
        run = RunConfig.from_dict(config)
        given, _ = flatten(config, known_fields())
    else:
        run = RunConfig.from_toml(config)
        given = read_toml(config, known_fields()).values
    if run.checkpoint.weights is None:
        return run
    given["checkpoint.weights"] = run.checkpoint.weights
    return drafted(given | _said_by_weights(given)).run()


def _said_by_weights(given: Mapping[str, Any]) -> dict[str, Any]:
    """By `checkpoint.weights`: the model, and the tokenizer of a text that has none."""
    settings = _settings_of_weights(given)
    return settings | _tokenizer_of_weights({**given, **settings})


def _settings_of_weights(given: Mapping[str, Any]) -> dict[str, Any]:
    """The model's settings of the run that made `checkpoint.weights`, where this run does not say another model."""
    url = given.get("checkpoint.weights")
    if not isinstance(url, str) or any(given.get(name) is not None for name in _WHOLE_MODELS):
        return {}
    # here, so that a configuration without weights is read without the code that trains
    from core.training.model.weights import model_settings

    settings = {}
    for name, value in model_settings(url).items():
        field = known_fields().get(name)
        if field is None or name in given:
            continue
        read_value = field.read(value)  # JSON has no tuples
        if read_value != field.default:
            settings[name] = read_value
    return settings


def _tokenizer_of_weights(given: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer of `checkpoint.weights`, where the text says none: it is not prepared, or another program's."""
    url, train = given.get("checkpoint.weights"), given.get("data.train")
    folder = given.get("model.huggingface")
    if not isinstance(url, str) or not train or given.get("data.tokenizer") or folder is not None:
        return {}
    # here, so that a configuration without weights is read without the code that trains
    from core.training.model.weights import tokenizer_for

    path = tokenizer_for(url, (train,) if isinstance(train, str) else tuple(train))
    return {} if path is None else {"data.tokenizer": path}


def load_run(
    args: Sequence[str] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    description: str = "",
) -> Loaded:
    """The run that a script's command line describes; see `merge`.

    args: default: those of this process. defaults: the script's own, by flat name ({"optimizer.lr": 2e-3}).
    Mistakes are printed to stderr, all at once, by one process per machine, and end the program with status 2
    (SystemExit); so does --help with 0. Issues no collective.
    """
    try:
        merged = merge(
            sys.argv[1:] if args is None else args, defaults=defaults, description=description
        )
    except ImportError as error:
        _leave([str(error)])
    try:
        return merged.loaded()
    except ConfigError as error:
        lines = [merged.with_origin(problem) for problem in error.problems]
        _leave(lines, OTHER_DEFAULTS if is_script(lines) else "")


def checked(loaded: Loaded, world_size: int) -> RunConfig:
    """The run for so many ranks; text that it names is prepared. Mistakes are told as by `load_run`, each in the
    names of the run's fields."""
    try:
        return with_token_files(loaded.run.check(world_size)).check(world_size)
    except ConfigError as error:
        _leave([in_the_runs_names(problem.text) for problem in error.problems], status=1)
    except (ValueError, OSError, ImportError) as error:
        # of text that cannot be prepared
        _leave([str(error)], status=1)


def _leave(lines: list[str], last: str = "", status: int = 2) -> NoReturn:
    """Tell them, and `last` of all of them, by one process per machine; every process finds the same ones."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say_mistake("\n".join(filter(None, (listed(lines), last))))
    else:
        let_the_first_rank_end()
    raise SystemExit(status)
