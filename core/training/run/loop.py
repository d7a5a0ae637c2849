"""The loop: step, optimizer, a line now and then. The same for every executor and layout."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, SupportsFloat

from torch import Tensor

from core.optimizer import StepStats
from core.pipeline import StepResult
from core.training.config import TrainingConfig
from core.training.log.metrics import MetricsLog, StepRecord, memory_mib
from core.training.run.evaluate import StepExecutor, next_token_loss


class Optimizer(Protocol):
    """What the loop needs of an optimizer."""

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        ...

    @property
    def loss_scale(self) -> float | Tensor:
        """What the next loss is multiplied by."""
        ...

    def step(self, num_tokens: float | Tensor | None = None) -> StepStats:
        """One update from the gradients, divided by the global number of tokens."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        ...

    def non_finite(self) -> list[str]:
        """Collective: which gradients made the last skipped step be skipped, and on which rank."""
        ...


class CheckpointHook(Protocol):
    """What the loop needs of `Checkpoints`."""

    def before_update(self) -> None:
        """Called when gradients are complete, before parameters change."""
        ...

    def after_step(self, step: int, *, last: bool, metrics: Mapping[str, SupportsFloat] | None = None) -> bool:
        """After update number `step`, of which `metrics` are known; True ends the run."""
        ...


@dataclass(frozen=True)
class FirstStep:
    """What the first step saw, to compare layouts by: loss in nats per token, and the gradient norm."""

    loss: float
    grad_norm: float

    def against(self, other: "FirstStep") -> str:
        """One line that compares this with the same step computed by one process."""
        apart = (abs(self.loss - other.loss), abs(self.grad_norm - other.grad_norm))
        difference = max(apart, key=lambda value: value if value == value else float("inf"))  # NaN is the largest
        return (
            f"first step here and in one process: loss {self.loss:.6f} and {other.loss:.6f}, gradient norm "
            f"{self.grad_norm:.6f} and {other.grad_norm:.6f}, max |difference| {difference:.1e}"
        )


class _Meter:
    """Time, tokens and skipped steps since the last record; sums stay on the device until they are read."""

    def __init__(self, start: int) -> None:
        self._last, self._since = time.perf_counter(), start
        self._tokens: Tensor | float = 0.0
        self._skipped: Tensor | int = 0

    def add(self, num_tokens: Tensor, skipped: Tensor) -> None:
        """Take one step's numbers into the running sums."""
        self._tokens, self._skipped = self._tokens + num_tokens, self._skipped + skipped

    def read(self, step: int) -> tuple[float, float, int]:
        """(tokens per second, seconds per step, skipped steps) up to and with `step`; starts anew."""
        tokens, skipped, now = float(self._tokens), int(self._skipped), time.perf_counter()
        seconds, steps = now - self._last, step + 1 - self._since
        self._last, self._since, self._tokens, self._skipped = now, step + 1, 0.0, 0
        return tokens / seconds, seconds / steps, skipped

    def leave_out(self, seconds: float) -> None:
        """Time that was no training."""
        self._last += seconds


def _due(step: int, interval: int) -> bool:
    return interval > 0 and (step + 1) % interval == 0


def _not_finite(optimizer: Optimizer) -> str:
    return ", ".join(optimizer.non_finite()[:5]) or "the norm"


def train(
    executor: StepExecutor,
    optimizer: Optimizer,
    batch_of: Callable[[int], Mapping[str, Tensor]],
    config: TrainingConfig,
    *,
    flops_per_token: int,
    peak_flops: float | None = None,
    log: MetricsLog,
    say: Callable[[str], None] = print,
    every_step: Callable[[int, float], None] | None = None,
    validate: Callable[[], float] | None = None,
    checkpoints: CheckpointHook | None = None,
    start: int = 0,
) -> FirstStep:
    """Run steps `start` .. train_steps - 1; `batch_of(step)` gives this rank's rows of the global batch.

    Logs every `log_interval` steps and at both ends, with the part of `peak_flops` (FLOP/s of all devices together,
    `metrics.total_peak_flops`) that the model used; `every_step(step, loss)` moves a progress bar;
    `validate()` gives bits per byte every `eval_interval` steps; `checkpoints` saves, and may end the run early.
    Returns what the first step saw. Raises RuntimeError: a loss that is no number. ValueError: no step left to run.
    """
    if start >= config.train_steps:
        raise ValueError(f"train_steps={config.train_steps} leaves nothing to do after step {start}; ask for more")
    executor.step_index = start  # what dropout draws in a step depends on it
    seen, meter = None, _Meter(start)
    for step in range(start, config.train_steps):
        optimizer.zero_grad()
        rate = optimizer.learning_rate
        result = executor.step(batch_of(step), next_token_loss, optimizer.loss_scale)
        if checkpoints is not None:
            checkpoints.before_update()
        stats = optimizer.step(num_tokens=result.num_tokens)
        meter.add(result.num_tokens, stats.skipped)
        last = step == config.train_steps - 1
        logged = last or step == start or _due(step, config.log_interval)
        # decided by the configuration alone: ranks differ in who shows a bar, and validation is collective
        validated = validate is not None and _due(step, config.eval_interval)
        if logged or validated or every_step is not None:  # else nothing waits for the device
            loss = float(result.loss_sum) / max(1, int(result.num_tokens))
            seen = seen or FirstStep(loss, float(stats.grad_norm))
            if loss != loss and logged:  # where every rank looks, so that none is left waiting
                raise RuntimeError(f"the loss of step {step} is not a number; lower the learning rate")
            if logged:
                record = _record(step, loss, rate, stats, result.num_tokens, meter, flops_per_token, peak_flops)
                log.add(record)
                say(record.line(config.train_steps))
                if bool(stats.skipped):  # the same on every rank
                    say(f"step {step + 1} was skipped; not finite: {_not_finite(optimizer)}")
            if every_step is not None:
                every_step(step + 1, loss)
        begin = time.perf_counter()
        if (bits := validate() if validated and validate is not None else None) is not None:
            say(f"step {step + 1:5d}/{config.train_steps} | validation {bits:.4f} bits per byte")
        stop = checkpoints is not None and checkpoints.after_step(step + 1, last=last, metrics=_metrics(result, bits))
        meter.leave_out(time.perf_counter() - begin)
        if stop:
            break
    assert seen is not None
    return seen


def _metrics(result: StepResult, bits: float | None) -> dict[str, SupportsFloat]:
    """By which checkpoints may be kept: `core.training.config` knows the names."""
    return {"loss": result.loss} | ({} if bits is None else {"validation.bits_per_byte": bits})


def _record(
    step: int,
    loss: float,
    rate: float,
    stats: StepStats,
    tokens: Tensor,
    meter: _Meter,
    flops_per_token: int,
    peak_flops: float | None,
) -> StepRecord:
    tokens_per_s, seconds, skipped = meter.read(step)
    flops_per_s = tokens_per_s * flops_per_token
    return StepRecord(
        step=step + 1,
        loss=loss,
        grad_norm=float(stats.grad_norm),
        learning_rate=rate,
        tokens_per_s=tokens_per_s,
        tflops_per_s=flops_per_s / 1e12,
        step_ms=1e3 * seconds,
        tokens=int(tokens),
        mfu=flops_per_s / peak_flops if peak_flops is not None else None,
        memory_mib=memory_mib(tokens.device),
        skipped=skipped,
    )
