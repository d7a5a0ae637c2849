"""A whole run: all its parts, read from plain values; all mistakes are reported at once."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from core.field_names import tells_names
from core.models.lora.config import LoraConfig
from core.optimizer.config import MOST_STEPS, OptimizerConfig
from core.optimizer.schedules.schedule import ENDLESS, LR_SCHEDULES
from core.parallel_state.config import ParallelConfig, raise_all
from core.training.config.data import DataConfig
from core.training.config.fields import Field, fields_of, flatten
from core.training.config.messages.deepspeed import AS_CALL, is_deepspeeds
from core.training.config.messages.huggingface import HUGGINGFACE
from core.training.config.messages.names import unknown
from core.training.config.parts import (
    CheckpointConfig,
    DataParallelConfig,
    PipelineConfig,
    TrainingConfig,
)
from core.training.config.rules import in_world, run_rules
from core.training.config.toml_files import read_toml, write_toml
from core.training.model.config import ModelConfig
from core.training.model.folder import tokenizer_in
from core.training.preferences.config import DPOConfig

_TRAIN_STEPS = "training.train_steps"
_DECAY_STEPS = "optimizer.lr_decay_steps"
# defaults of a run that differ from those of an optimizer alone
_OPTIMIZER_DEFAULTS: dict[str, Any] = {
    "lr_schedule": "cosine",
    "lr_warmup_fraction": 0.1,
    "weight_decay": 0.1,
}
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(?::(0|[1-9][0-9]{0,2}))?")


@tells_names("", HUGGINGFACE)
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run. `from_dict`, `from_toml` and `load_run` read one, and report all mistakes at once.

    Raises ValueError: a part that is of another class, a device that cannot be one.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters that are trained in its place."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How many ranks share it, in which way."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """How pipeline stages take turns."""

    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    """What the data ranks divide among themselves."""

    data: DataConfig = field(default_factory=DataConfig)
    """Which tokens are read."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """How long, in which batches, and what is logged."""

    dpo: DPOConfig = field(default_factory=DPOConfig)
    """How it learns from preferences, with training.objective=dpo."""

    optimizer: OptimizerConfig = None  # type: ignore[assignment]  # filled in: its schedule ends with the training
    """The update, its learning rate and its clipping."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved, and what the run starts from."""

    device: str | None = None
    """cpu, cuda, npu, xpu, or with an index cuda:1; default: the accelerator if there is one."""

    def __post_init__(self) -> None:
        if self.optimizer is None:
            steps = getattr(self.training, "train_steps", None)
            object.__setattr__(
                self, "optimizer", OptimizerConfig(**_OPTIMIZER_DEFAULTS, lr_decay_steps=steps)
            )
        for name, kind in PARTS.items():
            section = getattr(self, name)
            if not isinstance(section, kind):
                raise ValueError(
                    f"RunConfig: {name} is a {type(section).__name__}, a {kind.__name__} is needed; "
                    "RunConfig.from_dict reads plain values"
                )
        raise_all("RunConfig", _device_rules(self.device))
        if (
            self.data.tokenizer is None
            and (tokenizer := tokenizer_in(self.model.huggingface))
            and self.data.train
        ):
            object.__setattr__(self, "data", replace(self.data, tokenizer=tokenizer))

    @classmethod
    def from_dict(cls, nested: Mapping[str, Any]) -> "RunConfig":
        """The run that {"optimizer": {"lr": 3e-4}, ...} describes, or {"optimizer.lr": 3e-4}; defaults elsewhere.

        `optimizer.lr_decay_steps` is `training.train_steps` where the schedule needs it and nothing else is said.
        Raises ConfigError, a ValueError: unknown names, values of another kind, broken rules; all at once.
        """
        if not isinstance(nested, Mapping):
            kind = type(nested).__name__
            remedy = "a mapping is needed, as {'optimizer': {'lr': 3e-4}}"
            raise ConfigError((Problem("", f"from_dict was given a {kind}, {remedy}"),))
        if is_deepspeeds(nested):
            raise ConfigError(
                (Problem("", f"this is a configuration of DeepSpeed's; give {AS_CALL}"),)
            )
        return drafted(*flatten(nested, known_fields())).run()

    @classmethod
    def from_toml(cls, path: str | Path) -> "RunConfig":
        """As `from_dict`, of a TOML file. Raises ValueError: also a file that cannot be read."""
        read = read_toml(path, known_fields())
        return drafted(read.values, read.duplicates).run()

    def flat(self) -> dict[str, Any]:
        """{"optimizer.lr": 0.001, ...}: every field; a fact of the model that nobody gave is None, see `resolved`."""
        values = {}
        for name, known_field in known_fields().items():
            if known_field.section:
                owner = getattr(self, known_field.section)
            else:
                owner = self
            values[name] = getattr(owner, known_field.key)
        return values

    def resolved(self) -> dict[str, Any]:
        """The same with the model's facts filled in, for people to read."""
        return self.flat() | {f"model.{key}": value for key, value in self.model.resolved().items()}

    def to_dict(self) -> dict[str, Any]:
        """The same, part by part; `from_dict` gives the run again."""
        nested: dict[str, Any] = {}
        for name, value in self.flat().items():
            section, _, key = name.rpartition(".")
            table = nested.setdefault(section, {}) if section else nested
            table[key] = value
        return nested

    def to_toml(self, path: str | Path | None = None) -> str:
        """The same as TOML, also written to `path`; nothing is left to defaults, None is the text "None"."""
        return write_toml(known_fields().values(), self.flat(), path)

    def check(self, world_size: int, *, reads_text: bool = True) -> "RunConfig":
        """This run with `parallel.data` filled in, for a world of that many ranks.

        reads_text: false where a program gives batches of its own, and the default corpus stays unread.
        Raises ConfigError, a ValueError, with everything that does not fit together.
        """
        parallel, broken_rules = in_world(self.parallel, world_size)
        problems = [Problem("", message) for _, message in broken_rules]
        problems += between(self.sections() | {"parallel": parallel, "reads_text": reads_text})
        if problems:
            raise ConfigError(tuple(problems))
        return replace(self, parallel=parallel)

    def sections(self) -> dict[str, Any]:
        """{"model": its ModelConfig, ...}, as `check_run` takes them."""
        return {name: getattr(self, name) for name in PARTS}

    def digest(self) -> str:
        """sha256 of all values, as hex digits; the same wherever they came from."""
        return hashlib.sha256(json.dumps(self.flat(), sort_keys=True).encode()).hexdigest()


def _device_rules(device: object) -> Iterator[tuple[bool, str]]:
    """Whether it names a device at all; whether this machine has it is checked where it is used."""
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    yield (
        device != "gpu",
        "device='gpu': torch calls it cuda (NVIDIA, AMD), xpu (Intel) or npu; or leave it out",
    )
    yield (
        device is None
        or (match is not None and int(match[1] or 0) <= 127),  # torch stores the index in 8 bits
        f"device={device!r} must be a kind, as cpu or cuda, or kind:index with an index from 0 to 127, as cuda:1",
    )


PARTS: dict[str, type] = {
    "model": ModelConfig,
    "lora": LoraConfig,
    "parallel": ParallelConfig,
    "pipeline": PipelineConfig,
    "data_parallel": DataParallelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "dpo": DPOConfig,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
}


@cache
def known_fields() -> dict[str, Field]:
    """Flat name -> field, of all fields of a run."""
    config_fields = dict(fields_of(RunConfig))
    for key, default in _OPTIMIZER_DEFAULTS.items():
        # a run's own defaults, as --help and templates show them
        name = f"optimizer.{key}"
        config_fields[name] = replace(config_fields[name], default=default)
    return config_fields


class Problem(NamedTuple):
    """One mistake. name: the flat name of its field, or of its part; empty where it concerns several parts."""

    name: str
    text: str


class ConfigError(ValueError):
    """Everything that is wrong with the description of a run; what several rules say, once."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        once: dict[str, Problem] = {}
        for problem in problems:
            once.setdefault(problem.text, problem)
        problems = tuple(once.values())
        super().__init__("this run: " + "; ".join(problem.text for problem in problems))
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A run that was read, possibly with mistakes.

    values: of every field, as given where it is wrong. derived: field -> the field that it follows. parts: those
    without mistakes, and `device`. problems: all mistakes within parts.
    """

    values: dict[str, Any]
    derived: dict[str, str]
    sections: dict[str, Any]
    problems: tuple[Problem, ...]

    def run(self) -> RunConfig:
        """The run. Raises ConfigError: all mistakes, those between correct parts included."""
        if self.problems:
            raise ConfigError((*self.problems, *between(self.sections)))
        return RunConfig(**self.sections)


def between(sections: Mapping[str, Any]) -> tuple[Problem, ...]:
    """The broken rules between those parts of a run that could be built."""
    return tuple(Problem("", message) for holds, message in run_rules(sections) if not holds)


def drafted(raw_values: Mapping[str, Any], earlier_problems: Sequence[str] = ()) -> Draft:
    """Read flat names and values; `earlier_problems` are mistakes that were found before. Nothing is raised."""
    # every field as it was given, or its default
    config_fields = known_fields()
    values = {name: config_field.default for name, config_field in config_fields.items()}
    problems = [Problem("", text) for text in earlier_problems]
    # as given where wrong in `values`; in `valid` the default instead, so that the other rules can be checked
    valid = dict(values)
    for name, value in raw_values.items():
        if name not in config_fields:
            problems.append(Problem(name, unknown(name, config_fields)))
            continue
        values[name] = value
        try:
            values[name] = valid[name] = config_fields[name].read(value)
        except ValueError as error:
            problems.append(Problem(name, str(error)))
    wrong_names = {problem.name for problem in problems}
    derived = _fill_derived(valid, wrong_names)
    values |= {name: valid[name] for name in derived}

    # build each part by itself, so that the rules of all parts are checked even if one is wrong
    sections: dict[str, Any] = {}
    wrong_sections = {name.partition(".")[0] for name in wrong_names}
    for section, kind in PARTS.items():
        built, problem = _build_section(section, kind, valid, config_fields, derived)
        if problem is not None:
            problems.append(problem)
        if built is not None and section not in wrong_sections:
            sections[section] = built
    if "model" in sections:
        facts, sources = _resolved(sections["model"])
        # what a preset or folder says, so that --explain can tell it
        values = values | facts
        derived = derived | sources
    if "device" not in wrong_names:
        problems += [
            Problem("device", text) for holds, text in _device_rules(valid["device"]) if not holds
        ]
        sections["device"] = valid["device"]
    return Draft(values=values, derived=derived, sections=sections, problems=tuple(problems))


def _fill_derived(valid: dict[str, Any], wrong_names: set[str]) -> dict[str, str]:
    """Fill in what follows from other fields; returns field -> the field that it follows."""
    derived = _fill_decay_steps(valid, wrong_names)
    names = {"model.huggingface", "data.tokenizer", "data.train"}
    if not names & wrong_names and valid["data.tokenizer"] is None and valid["data.train"]:
        valid["data.tokenizer"] = tokenizer_in(valid["model.huggingface"])
        derived |= (
            {"data.tokenizer": "model.huggingface"} if valid["data.tokenizer"] is not None else {}
        )
    return derived


def _resolved(model: ModelConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """(field -> value of the facts that nobody gave, field -> the field that they follow)."""
    try:
        facts = model.resolved()
    except ValueError:
        # a folder that cannot be read, which the rules tell
        return {}, {}
    sources = {key: source for key in facts if (source := model.source_of(key)) is not None}
    return (
        {f"model.{key}": value for key, value in facts.items()},
        {f"model.{key}": f"model.{source}" for key, source in sources.items()},
    )


def _fill_decay_steps(valid: dict[str, Any], wrong_names: set[str]) -> dict[str, str]:
    schedule = valid["optimizer.lr_schedule"]
    warmup_fraction = valid["optimizer.lr_warmup_fraction"]
    needs_steps = schedule in LR_SCHEDULES and (schedule not in ENDLESS or warmup_fraction > 0)
    if not needs_steps or valid[_DECAY_STEPS] is not None or _DECAY_STEPS in wrong_names:
        return {}
    has_valid_steps = _TRAIN_STEPS not in wrong_names and 1 <= valid[_TRAIN_STEPS] <= MOST_STEPS
    # with wrong train_steps any large number, so that the schedule is not reported as well
    valid[_DECAY_STEPS] = valid[_TRAIN_STEPS] if has_valid_steps else MOST_STEPS
    return {_DECAY_STEPS: _TRAIN_STEPS}


def _build_section(
    section: str,
    kind: type,
    valid: Mapping[str, Any],
    config_fields: Mapping[str, Field],
    derived: Mapping[str, str],
) -> tuple[Any, Problem | None]:
    """A part from valid values, or its broken rules."""
    arguments = {
        field.key: valid[field.name] for field in config_fields.values() if field.section == section
    }
    try:
        return kind(**arguments), None
    except ValueError as error:
        text = f"{section}: {str(error).removeprefix(f'{kind.__name__}: ')}"
        # the message names a number that the user did not give
        for name, source in derived.items():
            if name == f"{section}.lr_decay_steps" and f"={valid[source]}" in text:
                text += f" ({name} follows {source}={valid[source]})"
        return None, Problem(section, text)
