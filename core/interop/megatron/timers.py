"""Megatron's timers: seconds by name on this rank, and the smallest and largest over all ranks."""

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from core.interop.megatron.absent import absent_names
from core.parallel_state import collectives, current_state

_OPTIONS = ("max", "minmax", "all")
_MOST_LEVEL = 2
_logger = logging.getLogger(__name__)


def _wait(barrier: bool) -> None:
    """Until the device has done what it was given; barrier: and every rank is here."""
    ps = current_state()
    if ps.device.type != "cpu":
        torch.accelerator.synchronize(ps.device)
    if barrier:
        collectives.barrier(ps.world)


class Timer:
    """Adds up the seconds between `start` and `stop`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._elapsed = self._active = 0.0
        self._began: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Raises ValueError: it runs."""
        if self._began is not None:
            raise ValueError(f"timer {self.name!r} was started 2 times; stop() it first")
        _wait(barrier)
        self._began = perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Raises ValueError: it does not run."""
        if self._began is None:
            raise ValueError(f"timer {self.name!r} runs 0 times; start() it first")
        _wait(barrier)
        passed = perf_counter() - self._began
        self._elapsed += passed
        self._active += passed
        self._began = None

    def reset(self) -> None:
        """Begin anew at 0; `active_time` goes on."""
        self._elapsed = 0.0
        self._began = None

    def set_elapsed(self, value: float) -> None:
        """The seconds so far."""
        self._elapsed = value

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last reset; one that runs goes on."""
        runs = self._began is not None
        if runs:
            self.stop(barrier=barrier)
        seconds = self._elapsed
        if reset:
            self.reset()
        if runs:
            self.start(barrier=barrier)
        return seconds

    def active_time(self) -> float:
        """Seconds in all."""
        return self._active


class _NoTimer(Timer):
    """Of a level above the one that is kept."""

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        raise ValueError(
            "0 seconds were taken: the timer's log_level is above that of Timers; make Timers(2, log_option)"
        )


class Timers:
    """`timers(name, log_level=0).start()`; those of a higher level than log_level measure nothing.

    log_option: "max", "minmax" or "all": what `log` tells over the ranks. Raises ValueError: another one.
    """

    def __init__(self, log_level: int, log_option: str) -> None:
        if log_option not in _OPTIONS:
            raise ValueError(f"log_option={log_option!r} is none of the 3: {', '.join(_OPTIONS)}")
        self._log_level = log_level
        self._log_option = log_option
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}
        self._none = _NoTimer("")

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name. Raises ValueError: a level above 2, or another than it was made with."""
        if name in self._timers:
            if log_level is not None and log_level != self._levels[name]:
                raise ValueError(
                    f"timer {name!r} has log_level={self._levels[name]}, not {log_level}; say the same"
                )
            return self._timers[name]
        level = _MOST_LEVEL if log_level is None else log_level
        if level > _MOST_LEVEL:
            raise ValueError(f"timer {name!r}: log_level={level} is above {_MOST_LEVEL}")
        if level > self._log_level:
            return self._none
        self._timers[name] = Timer(name)
        self._levels[name] = level
        return self._timers[name]

    def _seconds(self, names: Sequence[str], *, reset: bool, barrier: bool) -> Tensor:
        """[ranks, names], 0 where a rank has no such timer. Collective."""
        ps = current_state()
        _wait(barrier)
        own = [self._timers[n].elapsed(reset=reset) if n in self._timers else 0.0 for n in names]
        row = torch.tensor(own, dtype=torch.float64, device=ps.device)
        return collectives.all_gather(row, ps.world).view(-1, len(names)).cpu()

    def _ends(
        self, names: Sequence[str], normalizer: float, *, reset: bool, barrier: bool
    ) -> dict[str, tuple[float, float]]:
        seconds = self._seconds(names, reset=reset, barrier=barrier)
        found = {}
        for name, column in zip(names, seconds.unbind(1), strict=True):
            # ranks without the timer say nothing of it
            if len(taken := column[column > 0]):
                found[name] = (float(taken.min()) / normalizer, float(taken.max()) / normalizer)
        return found

    def get_all_timers_string(
        self,
        names: Sequence[str] | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> str | None:
        """Milliseconds over `normalizer`, by name; None where nothing was measured. Collective, with the same names
        on every rank. Raises ValueError: a normalizer that is not above 0."""
        if normalizer <= 0:
            raise ValueError(f"normalizer={normalizer} must be above 0")
        names = list(self._timers if names is None else names)
        if not names:
            return None
        if self._log_option == "all":
            rows = self._seconds(names, reset=reset, barrier=barrier) * 1000 / normalizer
            lines = ["times across ranks (ms):"]
            for name, column in zip(names, rows.unbind(1), strict=True):
                if column.any():
                    lines.append(f"  {name}:")
                    lines += [
                        f"     rank {rank:2d}: {time:.2f}"
                        for rank, time in enumerate(column.tolist())
                        if time
                    ]
            return "\n".join(lines) if len(lines) > 1 else None
        ends = self._ends(names, normalizer / 1000, reset=reset, barrier=barrier)
        is_max = self._log_option == "max"
        head = "max time across ranks (ms):" if is_max else "(min, max) time across ranks (ms):"
        shown = [
            f"    {name + ' ':.<48}: " + (f"{most:.2f}" if is_max else f"({least:.2f}, {most:.2f})")
            for name, (least, most) in ends.items()
        ]
        return "\n".join([head, *shown]) if shown else None

    def log(
        self,
        names: Sequence[str] | None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """`get_all_timers_string` to the logger of this module, level INFO, of `rank` (default: the last one)."""
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        ps = current_state()
        last = ps.config.world_size - 1
        if text is not None and ps.rank == (last if rank is None else rank):
            _logger.info(text)

    def write(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """The largest seconds over all ranks to a SummaryWriter's add_scalar, or to wandb's log. Collective."""
        for name, (_, most) in self._ends(names, normalizer, reset=reset, barrier=barrier).items():
            if hasattr(writer, "add_scalar"):
                writer.add_scalar(f"{name}-time", most, iteration)
            elif writer is not None:
                writer.log({f"{name}-time": most}, iteration)


__getattr__ = absent_names(__name__)
