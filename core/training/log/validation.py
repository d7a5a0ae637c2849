"""What a run's validations found: a row per text in metrics.jsonl, a line on the console, points in the page."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from core.training.log.json_rows import json_number, json_rows

# the name of the text that `data.valid` or `data.split` gives
MAIN = "validation"
# of preferences, as TRL names them
REWARDS = "rewards/"
# the other names stand behind validation_, apart from those of steps
_OF_THE_ROW = ("step", "time", "tokens_seen")


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
    """The loss (nats per token) of one text after `step` updates. best: no validation of it before was lower.

    time: seconds since 1970. tokens_seen: tokens that the run had read for training. rewards: of preferences, whose
    loss is of `tokens` pairs, and which have no bits per byte.
    """

    step: int
    name: str
    loss: float
    bits_per_byte: float | None
    tokens: int
    best: bool = False
    time: float | None = None
    tokens_seen: int | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def figure(self) -> tuple[float, str]:
        """What is told of it, and in which unit."""
        if self.bits_per_byte is None:
            return self.loss, "loss"
        return self.bits_per_byte, "bits per byte"

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where that is no number of 64 bits."""
        return perplexity(self.loss)

    def line(self, total: int) -> str:
        """One line of the console, at most 80 characters for usual names."""
        best = " | best" if self.best else ""
        if self.bits_per_byte is None:
            return (
                f"step {self.step:5d}/{total} | {self.name} loss {self.loss:.4f}"
                f"{rewards_in_words(self.rewards)}{best}"
            )
        return (
            f"step {self.step:5d}/{total} | {self.name} {self.bits_per_byte:.4f} bits per byte | "
            f"perplexity {self.perplexity:.4g}{best}"
        )

    def to_json(self) -> dict[str, Any]:
        """A row: {"step": 100, "validation": "books", "validation_loss": 3.2, ...}."""
        row: dict[str, Any] = {
            "step": self.step,
            "time": self.time,
            "tokens_seen": self.tokens_seen,
        }
        row["validation"] = self.name
        keys = ["loss", "perplexity", "bits_per_byte", "tokens", "best"]
        if self.bits_per_byte is None:
            keys = ["loss", "bits_per_byte", "tokens", "best"]
        for key in keys:
            row[f"validation_{key}"] = json_number(getattr(self, key))
        return row | {f"validation_{name}": value for name, value in self.rewards.items()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "ValidationRecord":
        """The inverse. Raises KeyError, TypeError, ValueError: a row of something else."""
        values: dict[str, Any] = {"name": row["validation"]}
        for column in fields(cls):
            if column.name in _OF_THE_ROW:
                key = column.name
            else:
                key = f"validation_{column.name}"
            if key in row:
                value = row[key]
                values[column.name] = float(value) if isinstance(value, str) else value
        prefix = f"validation_{REWARDS}"
        values["rewards"] = {
            name.removeprefix("validation_"): float(value)
            for name, value in row.items()
            if name.startswith(prefix)
        }
        return cls(**values)

    def scalars(self) -> dict[str, float]:
        """Name in TensorBoard and W&B -> value."""
        prefix = MAIN if self.name == MAIN else f"{MAIN}/{self.name}"
        values = {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }
        if self.bits_per_byte is None:
            values = {"loss": self.loss, **self.rewards}
        return {f"{prefix}/{key}": value for key, value in values.items() if value is not None}


def rewards_in_words(rewards: Mapping[str, float]) -> str:
    """` | rewards/chosen 0.0123 | ...`; empty without some."""
    return "".join(f" | {name} {value:.4f}" for name, value in rewards.items())


def perplexity(loss: float) -> float:
    """e to a loss in nats per token; infinite where that is no number of 64 bits."""
    if not loss > 700:
        return math.exp(loss)
    return math.inf


def best_of(records: Sequence[ValidationRecord], like: ValidationRecord) -> ValidationRecord | None:
    """The lowest loss so far of the text that `like` is of; of as many tokens: data may have been changed."""
    return min(
        (r for r in records if (r.name, r.tokens) == (like.name, like.tokens)),
        key=lambda r: (r.loss != r.loss, r.loss),
        default=None,
    )


def read_validations(path: str | Path) -> list[ValidationRecord]:
    """The validations of a `metrics.jsonl`, also of a run that was killed while it wrote a line."""
    return list(_read(path))


def _read(path: str | Path) -> Iterator[ValidationRecord]:
    for row in json_rows(path):
        try:
            yield ValidationRecord.from_json(row)
        except (ValueError, TypeError, KeyError):
            # a step, or a row of another version
            continue
