"""DeepSpeed's learning rates under its names, as pure functions of the number of updates made before.

DeepSpeed moves its schedulers after each update and starts them at -1, so most of them lag by one: the rate of
update n is their formula at n - 1, and update 0 has the lowest. These do the same, so that a run keeps its rates.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Protocol

from core.parallel_state.config import raise_all

Rules = Iterator[tuple[bool, str]]
MOMENTUM = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate")


class DeepSpeedSchedule(Protocol):
    """A learning rate that depends on nothing but the number of updates.

    leaves_out_skipped: updates of float16 that overflowed do not count (DeepSpeed does not move its schedulers then).
    """

    leaves_out_skipped: ClassVar[bool]

    def at(self, step: int) -> float:
        """The rate of the update before which `step` updates were made."""
        ...


@dataclass(frozen=True, kw_only=True)
class _CheckedSchedule:
    """A schedule that names all its mistakes at once."""

    leaves_out_skipped: ClassVar[bool] = True

    def __post_init__(self) -> None:
        raise_all(type(self).__name__, self._rules())

    def _rules(self) -> Rules:
        return iter(())


@dataclass(frozen=True, kw_only=True)
class _Warmup(_CheckedSchedule):
    """What the three schedules with a warm-up share."""

    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def _rules(self) -> Rules:
        yield (
            self.warmup_num_steps >= 1,
            f"warmup_num_steps={self.warmup_num_steps} must be at least 1",
        )
        yield (
            self.warmup_type in ("log", "linear"),
            f"unknown warmup_type {self.warmup_type!r}; known: log, linear",
        )

    @property
    def _warmup(self) -> int:
        # log 1 is 0: DeepSpeed's warm-ups have at least two steps
        return max(2, self.warmup_num_steps)

    def _warmup_share(self, step: int) -> float:
        """Share of the warm-up that is done at its step `step`."""
        if self.warmup_type == "log":
            return math.log(step + 1) / math.log(self._warmup)
        return step / self._warmup


@dataclass(frozen=True, kw_only=True)
class WarmupLR(_Warmup):
    """From `warmup_min_lr` up to `warmup_max_lr`, where it stays. Raises ValueError: values out of their range."""

    warmup_max_lr: float
    warmup_min_lr: float = 0.0

    def _rules(self) -> Rules:
        yield from super()._rules()
        yield (
            0 <= self.warmup_min_lr <= self.warmup_max_lr,
            f"warmup_min_lr={self.warmup_min_lr} must be between 0 and warmup_max_lr={self.warmup_max_lr}",
        )

    def at(self, step: int) -> float:
        """The rate of the update before which `step` updates were made."""
        # DeepSpeed's schedulers are one update behind
        lagged = step - 1
        if lagged < 0:
            share = 0.0
        elif lagged < self._warmup:
            share = self._warmup_share(lagged)
        else:
            share = self._share_after_warmup(lagged)
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * share

    def _share_after_warmup(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """The same warm-up, then linearly down to `warmup_min_lr` at `total_num_steps`.

    warmup_max_lr: as in DeepSpeed 0.001 where nothing is given, whatever the optimizer's rate is.
    """

    total_num_steps: int
    warmup_max_lr: float = 0.001

    def _rules(self) -> Rules:
        yield from super()._rules()
        yield _longer_than_warmup(self.total_num_steps, self._warmup)

    def _share_after_warmup(self, step: int) -> float:
        return max(0.0, (self.total_num_steps - step) / (self.total_num_steps - self._warmup))


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR(_Warmup):
    """Shares of `lr`: from `warmup_min_ratio` up to 1, then along a cosine down to `cos_min_ratio`.

    The very first update has a rate of 0, also with a `warmup_min_ratio`, as in DeepSpeed.
    Raises ValueError: values out of their range.
    """

    lr: float
    total_num_steps: int
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001

    def _rules(self) -> Rules:
        yield from super()._rules()
        yield self.lr >= 0, f"lr={self.lr} must be at least 0"
        yield _longer_than_warmup(self.total_num_steps, self._warmup)
        for name in ("warmup_min_ratio", "cos_min_ratio"):
            yield (
                0 <= getattr(self, name) <= 1,
                f"{name}={getattr(self, name)} must be between 0 and 1",
            )

    def at(self, step: int) -> float:
        """The rate of the update before which `step` updates were made."""
        # DeepSpeed's schedulers are one update behind
        lagged = step - 1
        if lagged < 0:
            return 0.0
        if lagged < self._warmup:
            return self.lr * (
                self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self._warmup_share(lagged)
            )
        done = min(1.0, (lagged - self._warmup + 1) / (self.total_num_steps - self._warmup))
        return self.lr * (
            self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2
        )


@dataclass(frozen=True, kw_only=True)
class OneCycle(_CheckedSchedule):
    """From `cycle_min_lr` up to `cycle_max_lr` and down again, then below it: min / (1 + rate * steps / step size).

    cycle_second_step_size: of the way down; default: that of the way up. Stair counts: in how many equal jumps each
    way is made; 0: none, it is smooth. The momentum is not cycled: it has a single value here.
    Raises ValueError: values out of their range.
    """

    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = False

    def _rules(self) -> Rules:
        yield (
            0 <= self.cycle_min_lr <= self.cycle_max_lr,
            f"cycle_min_lr={self.cycle_min_lr} must be between 0 and cycle_max_lr={self.cycle_max_lr}",
        )
        yield (
            self.cycle_first_step_size >= 1,
            f"cycle_first_step_size={self.cycle_first_step_size} must be at least 1",
        )
        not_negative = ("decay_lr_rate", "decay_step_size", "cycle_second_step_size", *_STAIRS)
        for name in not_negative:
            value = getattr(self, name)
            yield value is None or value >= 0, f"{name}={value} must be at least 0"
        yield (
            not self.cycle_momentum,
            "cycle_momentum=true is not supported, the momentum has 1 value for the whole run; use "
            "cycle_momentum=false (DeepSpeed's default is true: give it)",
        )

    def at(self, step: int) -> float:
        """The rate of the update before which `step` updates were made."""
        up = self.cycle_first_step_size
        if self.cycle_second_step_size is None:
            down = up
        else:
            down = self.cycle_second_step_size
        if step > up + down:
            if not self.decay_step_size:
                return self.cycle_min_lr
            decay = self.decay_lr_rate * (step - up - down) / self.decay_step_size
            return self.cycle_min_lr / (1 + decay)
        stairs = self.cycle_first_stair_count
        if step <= up:
            position = step
            length = up
        else:
            position = up + down - step
            length = down
            if self.cycle_second_stair_count is not None:
                stairs = self.cycle_second_stair_count
        if stairs:
            share = position * stairs // length / stairs
        else:
            share = position / length
        if down == 0 and step == up:
            share = 0.0  # the cycle ends where its top would be
        return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * share


_STAIRS = ("cycle_first_stair_count", "cycle_second_stair_count")


@dataclass(frozen=True, kw_only=True)
class LRRangeTest(_CheckedSchedule):
    """Grows for ever, to find the largest rate that trains: min * (1 + step_rate * steps / step_size), or in stairs.

    Raises ValueError: values out of their range.
    """

    lr_range_test_min_lr: float = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def _rules(self) -> Rules:
        size = self.lr_range_test_step_size
        yield size >= 1, f"lr_range_test_step_size={size} must be at least 1"
        for name in ("lr_range_test_min_lr", "lr_range_test_step_rate"):
            yield getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be at least 0"

    def at(self, step: int) -> float:
        """The rate of the update before which `step` updates were made."""
        size = self.lr_range_test_step_size
        steps = step // size if self.lr_range_test_staircase else step / size
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * steps)


SCHEDULES: dict[str, type] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": OneCycle,
    "LRRangeTest": LRRangeTest,
}


def _longer_than_warmup(total: int, warmup: int) -> tuple[bool, str]:
    return (
        total > warmup,
        f"total_num_steps={total} must be more than warmup_num_steps={warmup} (2 at least)",
    )


def schedule(name: str, options: Mapping[str, Any], lr: float) -> DeepSpeedSchedule:
    """The schedule `name` with DeepSpeed's parameters; `lr` stands in for a rate that is not given (but see
    `WarmupDecayLR`), and for a warmup_max_lr of "auto".

    Values may be texts, as from a command line. Raises ValueError: unknown parameters, with the nearest known ones;
    missing ones; values that are not of their kind or out of their range.
    """
    kind = SCHEDULES[name]
    if name == "WarmupLR":
        options = {"warmup_max_lr": lr} | dict(options)
    elif name == "WarmupCosineLR":
        options = {"lr": lr} | dict(options)
    # Hugging Face's word for the optimizer's
    if options.get("warmup_max_lr") == "auto":
        options = {**options, "warmup_max_lr": lr}
    raise_all(name, _option_rules(kind, options))
    types = {field.name: str(field.type) for field in fields(kind)}
    return kind(**{key: _convert(types[key], value) for key, value in options.items()})


def _option_rules(kind: type, options: Mapping[str, Any]) -> Rules:
    field_of_key = {field.name: field for field in fields(kind)}
    for key, value in options.items():
        if key in field_of_key:
            try:
                _convert(str(field_of_key[key].type), value)
            except (ValueError, TypeError, OverflowError):
                # int("inf") among them
                yield (
                    False,
                    f"{key}={value!r} is not of the kind {_type_name(str(field_of_key[key].type))}",
                )
        elif key in MOMENTUM and kind is OneCycle:
            yield (
                False,
                f"{key}={value} is not supported, the momentum has 1 value for the whole run; leave it out",
            )
        else:
            near = get_close_matches(key, field_of_key, n=1)
            if near:
                hint = f"did you mean {near[0]}?"
            else:
                hint = f"known: {', '.join(field_of_key)}"
            yield False, f"unknown parameter {key}; {hint}"
    for key, field in field_of_key.items():
        yield field.default is not MISSING or key in options, f"{key} is missing; give it"


def _type_name(declared: str) -> str:
    if "'" in declared:
        return declared.split("'")[1]
    return declared


def _convert(declared: str, value: Any) -> Any:
    """`value` in the type that its field declares. Raises ValueError or TypeError."""
    kind = _type_name(declared).split(" |")[0]
    if value is None and "None" in declared:
        return None
    if kind == "bool":
        booleans = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
        if str(value).lower() not in booleans:
            raise ValueError(value)
        return booleans[str(value).lower()]
    if kind == "str":
        return str(value)
    if isinstance(value, bool):
        raise TypeError(value)
    number = float(value)
    if kind == "int" and number != int(number):
        raise ValueError(value)
    if kind == "int":
        return int(number)
    return number
