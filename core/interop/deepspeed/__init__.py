"""From a ds_config.json to our configuration, with a verdict on every key: mapped, ignored or unsupported, and why.

    python -m core.interop.deepspeed ds_config.json --data-ranks 8

prints the table and the flags; its exit status is 1 where something is unsupported.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from core.interop.deepspeed.optimization import optimizer, scheduler
from core.interop.deepspeed.reader import NOT_GIVEN, ConfigReader, Told
from core.interop.deepspeed.sections import batch, dtypes, others, zero
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
    """What a ds_config means here.

    fields: section of a run ("training", "data_parallel", ...) -> field -> value. told: the verdict on every key.
    """

    fields: dict[str, dict[str, Any]]
    told: tuple[Told, ...]

    def onto(self, config: Config) -> Config:
        """`config` (a TrainingConfig, say) with the fields that the file sets. Raises ValueError as `config` does."""
        for name, kind in PARTS.items():
            if isinstance(config, kind):
                return replace(config, **self.fields.get(name, {}))  # type: ignore[type-var]
        raise ValueError(
            f"{type(config).__name__} has nothing from a ds_config; known: {', '.join(PARTS)}"
        )

    @property
    def unsupported(self) -> list[Told]:
        """The keys whose effect is missing here."""
        return [verdict for verdict in self.told if verdict.verdict == "unsupported"]

    def table(self) -> str:
        """One aligned line per key."""
        rows = [
            (told.verdict, told.key, json.dumps(told.value, default=str), told.words)
            for told in self.told
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = []
        for *cells, words in rows:
            padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
            lines.append("  ".join([*padded, words]))
        return "\n".join(lines)

    def flags(self) -> list[str]:
        """The same on the command line of `python -m core.pretrain`."""
        arguments: list[str] = []
        for section, fields in self.fields.items():
            for name, value in fields.items():
                flag = f"--{section}.{name}".replace("_", "-")
                # by the default: a field that may hold something else takes its bool as a word
                is_switch = isinstance(value, bool) and isinstance(
                    getattr(PARTS[section], name), bool
                )
                if is_switch:
                    arguments.append(flag if value else f"--{section}.no-{name}".replace("_", "-"))
                elif isinstance(value, dict):
                    words = map(str, chain.from_iterable(value.items()))
                    if value:
                        arguments += [flag, *words]
                else:
                    arguments += [flag, str(value)]
        return arguments


def _read(path: str) -> Any:
    """JSON, or what DeepSpeed takes beside it: comments, commas at the end, names without quotes.

    Raises ValueError: neither.
    """
    text = Path(path).read_text(encoding="utf-8-sig")
    try:
        return json.loads(text, object_pairs_hook=_refuse_repeated_keys)
    except json.JSONDecodeError as error:
        problem = f"{path} is no JSON: {error}"
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    # comments and trailing commas: what DeepSpeed reads as Hjson
    try:
        import hjson
    except ImportError:
        raise ValueError(
            f"{problem}; with comments or commas at the end it is Hjson: pip install hjson"
        ) from None
    try:
        return hjson.loads(text, object_pairs_hook=_refuse_repeated_keys)
    except ValueError as error:
        raise ValueError(f"{problem}; and no Hjson: {error}") from None


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key, value in pairs:
        if key in config:
            raise ValueError(f"the key {key!r} is there 2 times; leave one out")
        config[key] = value
    return config


def from_deepspeed(
    config: str | Path | Mapping[str, Any],
    *,
    data_ranks: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> FromDeepSpeed:
    """Read a ds_config.json, or its content; with comments and commas at the end where `hjson` is installed.

    data_ranks: data parallel ranks of the run, for sizes that depend on it. auto: key ("scheduler.params.
    total_num_steps") -> value, where the file says "auto" and Hugging Face's Trainer would fill it in.
    DeepSpeed's defaults that differ from ours (stage 0, no weight decay) are among the fields.
    `initialize(model, from_deepspeed(...).fields)` is the migration. One warning lists what is unsupported,
    another says at what gradients are clipped where the file does not.
    Raises ValueError: no JSON object, a key twice, values of the wrong kind or out of range, batch sizes that
    contradict each other.
    """
    source = "ds_config"
    if not isinstance(config, Mapping):
        source = str(config)
        config = _read(source)
        if not isinstance(config, dict):
            raise ValueError(
                f"{source} holds a {type(config).__name__}, not an object; give a ds_config"
            )
    try:
        reader = ConfigReader(config, auto or {}, data_ranks)
        # sections in this order: the scheduler needs the optimizer's rate
        for read_section in (batch, zero, dtypes, optimizer, scheduler, others):
            read_section(reader)
        reader.report_unread()
        # in the order of the file; what the file does not say comes last
        position = {key: index for index, key in enumerate(reader.order)}
        verdicts = sorted(
            reader.verdicts.values(), key=lambda verdict: position.get(verdict.key, len(position))
        )
        result = FromDeepSpeed(reader.fields, tuple(verdicts))
        for name, kind in PARTS.items():
            if name in result.fields:
                # raises where our own rules are broken
                result.onto(kind())
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    unsupported = result.unsupported
    if unsupported:
        reasons = "\n".join(f"  {verdict.key}: {verdict.words}" for verdict in unsupported)
        count = len(result.told)
        warnings.warn(
            f"{source}: {len(unsupported)} of {count} keys are unsupported:\n{reasons}",
            stacklevel=2,
        )
    clips = next((verdict for verdict in result.told if verdict.key == "gradient_clipping"), None)
    if clips is not None and clips.value == NOT_GIVEN:
        warnings.warn(
            f"{source} has no gradient_clipping: gradients are clipped at a norm of 1.0, as DeepSpeed does today; "
            'its older versions do not clip; say "gradient_clipping": 1.0, or 0 for none',
            stacklevel=2,
        )
    return result
