"""From a ds_config.json to our configuration; every key is told: mapped to what, ignored or unsupported, and why.

    python -m core.interop.deepspeed ds_config.json --data-ranks 8

prints the table and the flags; its exit status is 1 where something is unsupported.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from core.interop.deepspeed.reader import ConfigReader, Told
from core.interop.deepspeed.sections import batch, dtypes, optimizer, others, scheduler, zero
from core.optimizer import OptimizerConfig
from core.parallel_state import ParallelConfig
from core.training.config import DataParallelConfig, ModelConfig, PipelineConfig, TrainingConfig

__all__ = ["FromDeepSpeed", "Told", "from_deepspeed"]

PARTS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "pipeline": PipelineConfig,
    "data_parallel": DataParallelConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
}
Config = TypeVar("Config")


@dataclass(frozen=True)
class FromDeepSpeed:
    """fields: part of a run ("training", "data_parallel", ...) -> field -> value. told: every key, none left out."""

    fields: dict[str, dict[str, Any]]
    told: tuple[Told, ...]

    def onto(self, config: Config) -> Config:
        """`config` (a TrainingConfig, say) with what the file says about it. Raises ValueError: as `config` does."""
        for name, kind in PARTS.items():
            if isinstance(config, kind):
                return replace(config, **self.fields.get(name, {}))  # type: ignore[type-var]
        raise ValueError(f"{type(config).__name__} has nothing from a ds_config; known: {', '.join(PARTS)}")

    @property
    def unsupported(self) -> list[Told]:
        """The keys whose effect is missing here."""
        return [told for told in self.told if told.verdict == "unsupported"]

    def table(self) -> str:
        """One aligned line per key."""
        rows = [(told.verdict, told.key, json.dumps(told.value, default=str), told.words) for told in self.told]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        return "\n".join("  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]) for row in rows)

    def flags(self) -> list[str]:
        """The same on the command line of examples/pretrain_gpt.py."""
        made = []
        for part, fields in self.fields.items():
            for name, value in fields.items():
                flag = f"--{part}.{name}".replace("_", "-")
                if isinstance(value, bool) and isinstance(getattr(PARTS[part], name), bool):  # the default's kind
                    made.append(flag if value else f"--{part}.no-{name}".replace("_", "-"))
                elif isinstance(value, dict):
                    made += [flag, *(str(x) for pair in value.items() for x in pair)] if value else []
                else:
                    made += [flag, str(value)]
        return made


def _read(path: str) -> Any:
    """JSON, or what DeepSpeed takes beside it: comments, commas at the end, names without quotes.

    Raises ValueError: neither.
    """
    text = Path(path).read_text(encoding="utf-8-sig")
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        told = f"{path} is no JSON: {error}"
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        import hjson
    except ImportError:
        raise ValueError(f"{told}; with comments or commas at the end it is Hjson: pip install hjson") from None
    try:
        return hjson.loads(text, object_pairs_hook=_once)
    except ValueError as error:
        raise ValueError(f"{told}; and no Hjson: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for i, (key, _) in enumerate(pairs):
        if key in dict(pairs[:i]):
            raise ValueError(f"the key {key!r} is there 2 times; leave one out")
    return dict(pairs)


def from_deepspeed(
    config: str | Path | Mapping[str, Any], *, data_ranks: int | None = None, auto: Mapping[str, Any] | None = None
) -> FromDeepSpeed:
    """Read a ds_config.json, or its content; with comments and commas at the end where `hjson` is installed.

    data_ranks: data parallel ranks of the run, for sizes that depend on it. auto: key ("scheduler.params.
    total_num_steps") -> value, where the file says "auto" and Hugging Face's Trainer would fill it in.
    DeepSpeed's defaults that differ from ours (stage 0, no weight decay) are among the fields.
    `initialize(model, from_deepspeed(...).fields)` is the migration. What is unsupported is told in one warning.
    Raises ValueError: no JSON object, a key twice, values of the wrong kind or out of range, batch sizes that
    contradict each other.
    """
    where = "ds_config"
    if not isinstance(config, Mapping):
        where = str(config)
        config = _read(where)
        if not isinstance(config, dict):
            raise ValueError(f"{where} holds a {type(config).__name__}, not an object; give a ds_config")
    try:
        reader = ConfigReader(config, auto or {}, data_ranks)
        for part in (batch, zero, dtypes, optimizer, scheduler, others):
            part(reader)
        reader.rest()
        found = FromDeepSpeed(reader.fields, tuple(sorted(reader.told.values(), key=_place(reader.order))))
        for name, kind in PARTS.items():
            if name in found.fields:
                found.onto(kind())  # our own rules
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if missing := found.unsupported:
        each = "\n".join(f"  {told.key}: {told.words}" for told in missing)
        warnings.warn(f"{where}: {len(missing)} of {len(found.told)} keys are unsupported:\n{each}", stacklevel=2)
    return found


def _place(order: list[str]) -> Any:
    at = {key: i for i, key in enumerate(order)}
    return lambda told: at.get(told.key, len(at))
