"""The loop: step, optimizer, a line now and then. The same for every executor and layout."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from core.optimizer import StepStats
from core.training.config import TrainingConfig
from core.training.evaluate import Executor, next_token_loss
from core.training.metrics import MetricsLog, StepRecord


class Optimizer(Protocol):
    """What the loop needs of an optimizer."""

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        ...

    def step(self, num_tokens: float | Tensor | None = None) -> StepStats:
        """One update from the gradients, divided by the global number of tokens."""
        ...

    def zero_grad(self) -> None:
        """Start over."""
        ...


@dataclass(frozen=True)
class FirstStep:
    """What the first step saw, to compare layouts by: loss in nats per token, and the gradient norm."""

    loss: float
    grad_norm: float

    def against(self, other: "FirstStep") -> str:
        """One line that compares this with the same step computed by one process."""
        difference = max(abs(self.loss - other.loss), abs(self.grad_norm - other.grad_norm))
        return (
            f"first step here and in one process: loss {self.loss:.6f} and {other.loss:.6f}, gradient norm "
            f"{self.grad_norm:.6f} and {other.grad_norm:.6f}, max |difference| {difference:.1e}"
        )


class _Window:
    """The steps since the last record: their tokens (on the device, so that counting waits for nothing) and time."""

    def __init__(self, start: int, flops_per_token: int) -> None:
        self.flops_per_token = flops_per_token
        self._open(start)

    def _open(self, step: int) -> None:
        self.begin, self.first, self.tokens = time.perf_counter(), step, 0.0

    def close(self, steps_done: int, loss: float, grad_norm: float, rate: float) -> StepRecord:
        """The record of the steps so far; the next window begins."""
        tokens, seconds = float(self.tokens), time.perf_counter() - self.begin
        record = StepRecord(
            step=steps_done,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            tokens_per_s=tokens / seconds,
            tflops_per_s=tokens * self.flops_per_token / seconds / 1e12,
            step_ms=1e3 * seconds / (steps_done - self.first),
            tokens=int(tokens),
        )
        self._open(steps_done)
        return record


def train(
    executor: Executor,
    optimizer: Optimizer,
    batch_of: Callable[[int], Mapping[str, Tensor]],
    config: TrainingConfig,
    *,
    flops_per_token: int,
    log: MetricsLog,
    say: Callable[[str], None] = print,
    every_step: Callable[[int, float], None] | None = None,
    validate: Callable[[], float] | None = None,
    start: int = 0,
) -> FirstStep:
    """Run steps `start` .. train_steps - 1; `batch_of(step)` gives this rank's rows of the global batch.

    Logs every `log_interval` steps and at both ends; `every_step(step, loss)` moves a progress bar;
    `validate()` gives bits per byte every `eval_interval` steps. Returns what the first step saw.
    Raises RuntimeError: a loss that is not a number, at the next step that is logged.
    """
    seen, window = None, _Window(start, flops_per_token)
    for step in range(start, config.train_steps):
        done, rate = step + 1, optimizer.learning_rate
        optimizer.zero_grad()
        result = executor.step(batch_of(step), next_token_loss)
        stats = optimizer.step(num_tokens=result.num_tokens)
        window.tokens += result.num_tokens
        if step == start or done % config.log_interval == 0 or done == config.train_steps:
            loss, norm = float(result.loss), float(stats.grad_norm)
            if loss != loss:
                raise RuntimeError(f"the loss of step {done} is not a number: try a lower lr, or look at the data")
            seen = seen or FirstStep(loss, norm)
            record = window.close(done, loss, norm, rate)
            log.add(record)
            say(record.line(config.train_steps))
        if every_step is not None:
            every_step(done, float(result.loss))
        if validate is not None and config.eval_interval and done % config.eval_interval == 0:
            begin = time.perf_counter()
            say(f"step {done:5d}/{config.train_steps} | validation {validate():.4f} bits per byte")
            window.begin += time.perf_counter() - begin
    if seen is None:
        raise ValueError(f"nothing to train: start={start} is not below train_steps={config.train_steps}")
    return seen
