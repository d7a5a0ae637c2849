"""A whole run: all its parts, read from plain values, with everything that is wrong told at once."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from core.optimizer.config import MOST_STEPS, OptimizerConfig
from core.optimizer.schedules.schedule import ENDLESS, LR_SCHEDULES
from core.parallel_state.config import ParallelConfig, raise_all
from core.training.config.data import DataConfig
from core.training.config.fields import Field, fields_of, flatten
from core.training.config.model import ModelConfig
from core.training.config.names import unknown
from core.training.config.parts import CheckpointConfig, DataParallelConfig, PipelineConfig, TrainingConfig
from core.training.config.rules import check_run, run_rules
from core.training.config.toml_files import read_toml, write_toml

_STEPS, _DECAY = "training.train_steps", "optimizer.lr_decay_steps"
# where a run begins otherwise than an optimizer by itself
_OPTIMIZER: dict[str, Any] = {"lr_schedule": "cosine", "lr_warmup_fraction": 0.1, "weight_decay": 0.1}
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(?::(0|[1-9][0-9]{0,2}))?")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run is told. `from_dict`, `from_toml` and `load_run` read one, and tell all mistakes at once.

    Raises ValueError: a part that is of another class, a device that cannot be one.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How many ranks share it, in which way."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """How pipeline stages take turns."""

    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    """What the data ranks divide among themselves."""

    data: DataConfig = field(default_factory=DataConfig)
    """Which tokens are read."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """How long, in which batches, and what is told."""

    optimizer: OptimizerConfig = None  # type: ignore[assignment]  # filled in: its schedule ends with the training
    """The update, its learning rate and its clipping."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved, and what the run starts from."""

    device: str | None = None
    """cpu, cuda, npu, xpu, or with an index cuda:1; default: the accelerator if there is one."""

    def __post_init__(self) -> None:
        if self.optimizer is None:
            steps = getattr(self.training, "train_steps", None)
            object.__setattr__(self, "optimizer", OptimizerConfig(**_OPTIMIZER, lr_decay_steps=steps))
        for name, kind in PARTS.items():
            part = getattr(self, name)
            if not isinstance(part, kind):
                raise ValueError(
                    f"RunConfig: {name} is a {type(part).__name__}, a {kind.__name__} is needed; "
                    "RunConfig.from_dict reads plain values"
                )
        raise_all("RunConfig", _device_rules(self.device))

    @classmethod
    def from_dict(cls, nested: Mapping[str, Any]) -> "RunConfig":
        """The run that {"optimizer": {"lr": 3e-4}, ...} describes, or {"optimizer.lr": 3e-4}; defaults elsewhere.

        `optimizer.lr_decay_steps` is `training.train_steps` where the schedule needs it and nothing else is said.
        Raises ConfigError, a ValueError: unknown names, values of another kind, broken rules; all at once.
        """
        if not isinstance(nested, Mapping):
            given = type(nested).__name__
            needed = "a mapping is needed, as {'optimizer': {'lr': 3e-4}}"
            raise ConfigError((Problem("", f"from_dict was given a {given}, {needed}"),))
        return drafted(*flatten(nested, known_fields())).run()

    @classmethod
    def from_toml(cls, path: str | Path) -> "RunConfig":
        """As `from_dict`, of a TOML file. Raises ValueError: also a file that cannot be read."""
        read = read_toml(path, known_fields())
        return drafted(read.values, read.twice).run()

    def flat(self) -> dict[str, Any]:
        """{"model.style": "llama", ...}: every field."""
        made = {}
        for name, known in known_fields().items():
            made[name] = getattr(getattr(self, known.part) if known.part else self, known.key)
        return made

    def to_dict(self) -> dict[str, Any]:
        """The same, part by part; `from_dict` gives the run again."""
        nested: dict[str, Any] = {}
        for name, value in self.flat().items():
            part, _, key = name.rpartition(".")
            (nested.setdefault(part, {}) if part else nested)[key] = value
        return nested

    def to_toml(self, path: str | Path | None = None) -> str:
        """The same as TOML, also written to `path`; nothing is left to defaults, None is the text "None"."""
        return write_toml(known_fields().values(), self.flat(), path)

    def check(self, world_size: int) -> "RunConfig":
        """This run with `parallel.data` filled in, for a world of that many ranks.

        Raises ValueError with everything that does not fit together.
        """
        return replace(self, parallel=check_run(**self.parts(), world_size=world_size))

    def parts(self) -> dict[str, Any]:
        """{"model": its ModelConfig, ...}, as `check_run` takes them."""
        return {name: getattr(self, name) for name in PARTS}

    def digest(self) -> str:
        """sha256 of all values, as hex digits; the same wherever they came from."""
        return hashlib.sha256(json.dumps(self.flat(), sort_keys=True).encode()).hexdigest()


def _device_rules(device: object) -> Iterator[tuple[bool, str]]:
    """Whether it can be a device at all; whether this machine has it is asked where it is used."""
    found = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    yield (
        device is None or (found is not None and int(found[1] or 0) <= 127),  # torch counts in 8 bits
        f"device={device!r} must be a kind, as cpu or cuda, or kind:index with an index from 0 to 127, as cuda:1",
    )


PARTS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "pipeline": PipelineConfig,
    "data_parallel": DataParallelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
}


@cache
def known_fields() -> dict[str, Field]:
    """Flat name -> field, of all fields of a run."""
    known = fields_of(RunConfig)
    return known | {
        f"optimizer.{key}": replace(known[f"optimizer.{key}"], default=d) for key, d in _OPTIMIZER.items()
    }


class Problem(NamedTuple):
    """One mistake. name: the flat name of the field, where it is one field's; or the part, where it is one part's."""

    name: str
    text: str


class ConfigError(ValueError):
    """Everything that is wrong with the description of a run."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("this run: " + "; ".join(problem.text for problem in problems))
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What was given of a run, and what could be made of it.

    values: of every field, as given where it is wrong. derived: field -> the field that it follows. parts: those
    without mistakes, and `device`. problems: all mistakes within parts.
    """

    values: dict[str, Any]
    derived: dict[str, str]
    parts: dict[str, Any]
    problems: tuple[Problem, ...]

    def run(self) -> RunConfig:
        """The run. Raises ConfigError: mistakes; those between parts without one are told with them."""
        if self.problems:
            raise ConfigError((*self.problems, *between(self.parts)))
        return RunConfig(**self.parts)


def between(parts: Mapping[str, Any]) -> tuple[Problem, ...]:
    """The broken rules between those parts of a run that are there."""
    return tuple(Problem("", message) for holds, message in run_rules(parts) if not holds)


def drafted(given: Mapping[str, Any], said: Sequence[str] = ()) -> Draft:
    """Read flat names and values; `said` are mistakes that were found before. Nothing is raised."""
    known = known_fields()
    values = {name: known_field.default for name, known_field in known.items()}
    problems, good = [Problem("", text) for text in said], dict(values)
    for name, value in given.items():
        if name not in known:
            problems.append(Problem(name, unknown(name, known)))
            continue
        values[name] = value
        try:
            values[name] = good[name] = known[name].read(value)
        except ValueError as error:
            problems.append(Problem(name, str(error)))
    wrong = {problem.name for problem in problems}
    derived = _derived(good, wrong)
    values |= {name: good[source] for name, source in derived.items()}
    parts: dict[str, Any] = {}
    for part, kind in PARTS.items():
        built, problem = _build(part, kind, good, known, derived)
        problems += [problem] if problem else []
        if built is not None and part not in {name.partition(".")[0] for name in wrong}:
            parts[part] = built
    if "device" not in wrong:
        problems += [Problem("device", text) for holds, text in _device_rules(good["device"]) if not holds]
        parts["device"] = good["device"]
    return Draft(values=values, derived=derived, parts=parts, problems=tuple(problems))


def _derived(good: dict[str, Any], wrong: set[str]) -> dict[str, str]:
    """Fill in what follows from other fields; field -> the field that it follows."""
    own = good["optimizer.lr_schedule"] in LR_SCHEDULES
    ends = own and (good["optimizer.lr_schedule"] not in ENDLESS or good["optimizer.lr_warmup_fraction"] > 0)
    if not ends or good[_DECAY] is not None or _DECAY in wrong:
        return {}
    right = _STEPS not in wrong and 1 <= good[_STEPS] <= MOST_STEPS
    good[_DECAY] = good[_STEPS] if right else MOST_STEPS  # so that nothing else seems wrong because of it
    return {_DECAY: _STEPS}


def _build(
    part: str, kind: type, good: Mapping[str, Any], known: Mapping[str, Field], derived: Mapping[str, str]
) -> tuple[Any, Problem | None]:
    """A part from good values, or its broken rules."""
    arguments = {field.key: good[field.name] for field in known.values() if field.part == part}
    try:
        return kind(**arguments), None
    except ValueError as error:
        text = f"{part}: {str(error).removeprefix(f'{kind.__name__}: ')}"
        for name, source in derived.items():  # the schedule speaks of a number that nobody gave
            if name.startswith(f"{part}.") and f"={good[source]}" in text:
                text += f" ({name} follows {source}={good[source]})"
        return None, Problem(part, text)
