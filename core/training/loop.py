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
        """Of the last step."""
        ...

    def step(self, num_tokens: int | Tensor | None = None) -> StepStats:
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
    first: int = 0,
) -> FirstStep | None:
    """Run steps `first` .. train_steps - 1; `batch_of(step)` gives this rank's rows of the global batch.

    Logs every `log_interval` steps and at both ends. `every_step(step, loss)` is for a progress bar or an
    evaluation. Returns what step 0 saw (None when resuming). Raises RuntimeError: a loss that is not finite.
    """
    seen = None
    last, since, tokens = time.perf_counter(), first, 0
    for step in range(first, config.train_steps):
        optimizer.zero_grad()
        result = executor.step(batch_of(step), next_token_loss)
        stats = optimizer.step(num_tokens=result.num_tokens)
        tokens += int(result.num_tokens)
        logged = step == first or (step + 1) % config.log_interval == 0 or step + 1 == config.train_steps
        if not logged and every_step is None:
            continue
        loss = float(result.loss_sum) / max(1, int(result.num_tokens))
        if loss != loss:
            raise RuntimeError(f"the loss of step {step} is not a number; lower the learning rate or look at the data")
        if step == 0:
            seen = FirstStep(loss, float(stats.grad_norm))
        if logged:
            now = time.perf_counter()
            seconds, steps = now - last, step + 1 - since
            record = StepRecord(
                step=step + 1,
                loss=loss,
                grad_norm=float(stats.grad_norm),
                learning_rate=optimizer.learning_rate,
                tokens_per_s=tokens / seconds,
                tflops_per_s=tokens * flops_per_token / seconds / 1e12,
                step_ms=1e3 * seconds / steps,
                tokens=int(result.num_tokens),
            )
            log.add(record)
            say(record.line(config.train_steps))
            last, since, tokens = now, step + 1, 0
        if every_step is not None:
            every_step(step + 1, loss)
    return seen
