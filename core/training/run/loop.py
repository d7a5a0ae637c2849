"""The training loop: step, optimizer, a line now and then. The same for every executor and layout."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsFloat

from torch import Tensor

from core.optimizer import StepStats
from core.parallel_state.environment import HostCopy, reading_waits
from core.pipeline import LossFn, StepResult
from core.pipeline.run.ranges import named
from core.training.config import TrainingConfig
from core.training.log.metrics import MetricsLog, StepRecord, memory_mib
from core.training.log.profile import StepProfiler
from core.training.log.validation import MAIN, ValidationRecord
from core.training.preferences.loss import DPOLoss
from core.training.run.evaluate import StepExecutor, TextLoss, next_token_loss
from core.transformer.moe.load import ExpertLoad


class Optimizer(Protocol):
    """What the loop needs of an optimizer."""

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        ...

    @property
    def loss_scale(self) -> float | Tensor:
        """The next loss is multiplied by this (mixed precision with float16)."""
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

    def after_step(
        self, step: int, *, last: bool, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> bool:
        """After update number `step`, of which `metrics` are known; True ends the run."""
        ...


@dataclass(frozen=True)
class FirstStep:
    """Loss in nats per token and gradient norm of the first step, to compare layouts by."""

    loss: float
    grad_norm: float

    def against(self, other: "FirstStep") -> str:
        """One line that compares this with the same step computed by one process."""
        differences = (abs(self.loss - other.loss), abs(self.grad_norm - other.grad_norm))
        is_nan = any(difference != difference for difference in differences)
        largest = float("nan") if is_nan else max(differences)
        return (
            f"first step here and in one process: loss {self.loss:.6f} and {other.loss:.6f}, gradient norm "
            f"{self.grad_norm:.6f} and {other.grad_norm:.6f}, max |difference| {largest:.1e}"
        )


class _Meter:
    """Makes the records: time, tokens and skipped steps since the last one; sums stay on the device until read.

    flops_per_token: of the model. peak_flops: of all devices together. tokens_per_step: of all ranks, 0: not known.
    """

    def __init__(
        self,
        start: int,
        flops_per_token: int,
        peak_flops: float | None,
        tokens_per_step: int,
        experts: Callable[[], Sequence[ExpertLoad]] | None,
    ) -> None:
        self._flops = flops_per_token
        self._peak = peak_flops
        self._tokens_per_step = tokens_per_step
        self._experts = experts
        self._last_read = time.perf_counter()
        self._first_step = start
        self._tokens: Tensor | float = 0.0
        self._skipped: Tensor | int = 0
        self._spikes: Tensor | int = 0

    def add(self, num_tokens: Tensor, stats: StepStats) -> None:
        """Take one step's numbers into the running sums."""
        # tensors: reading them in every step would make the host wait for the device
        self._tokens = self._tokens + num_tokens
        self._skipped = self._skipped + stats.skipped
        self._spikes = self._spikes + (stats.skipped & ~stats.found_inf)

    def record(
        self,
        step: int,
        loss: float,
        learning_rate: float,
        stats: StepStats,
        tokens: Tensor,
        rewards: Mapping[str, float],
    ) -> StepRecord:
        """What is logged of step number `step` (from 0), with the rates since the last record."""
        spikes = int(self._spikes)
        self._spikes = 0
        tokens_per_s, seconds, skipped = self._read(step)
        # of the model; activation checkpointing's forward does not count
        flops_per_s = tokens_per_s * self._flops
        mfu = flops_per_s / self._peak if self._peak is not None else None
        # above 1 the figure of the device is no peak
        if mfu is not None and mfu > 1:
            mfu = None
        return StepRecord(
            step=step + 1,
            loss=loss,
            grad_norm=float(stats.grad_norm),
            learning_rate=learning_rate,
            tokens_per_s=tokens_per_s,
            tflops_per_s=flops_per_s / 1e12,
            step_ms=1e3 * seconds,
            tokens=int(tokens),
            mfu=mfu,
            memory_mib=memory_mib(tokens.device),
            skipped=skipped,
            time=time.time(),
            tokens_seen=self.tokens_seen(step),
            experts=tuple(self._experts()) if self._experts is not None else (),
            spikes=spikes,
            rewards=rewards,
        )

    def tokens_seen(self, step: int) -> int | None:
        """Tokens that were read when step number `step` (from 0) was made."""
        return self._tokens_per_step * (step + 1) or None

    def _read(self, step: int) -> tuple[float, float, int]:
        """(tokens per second, seconds per step, skipped steps) up to and with `step`; starts anew."""
        # waits for the device: take the time afterwards
        tokens = float(self._tokens)
        skipped = int(self._skipped)
        now = time.perf_counter()
        seconds = now - self._last_read
        steps = step + 1 - self._first_step
        self._last_read = now
        self._first_step = step + 1
        self._tokens, self._skipped = 0.0, 0
        return tokens / seconds, seconds / steps, skipped

    def leave_out(self, seconds: float) -> None:
        """Time that was no training, such as validation or a save."""
        self._last_read += seconds


class _Progress:
    """Tells a progress bar each step's loss: of an accelerator that of the step before, which is known already."""

    def __init__(self, every_step: Callable[[int, float], None] | None) -> None:
        self._every_step = every_step
        self._before: HostCopy | None = None

    def show(self, step: int, loss: Tensor) -> None:
        """`step` updates are made, the last one with `loss`."""
        if self._every_step is None:
            return
        latest = HostCopy(loss)
        if self._before is None or not reading_waits(loss.device):
            shown = latest
        else:
            shown = self._before
        self._before = latest
        self._every_step(step, shown.read())


class _Reporter:
    """What the loop tells of a run: a record and a line of a step, of a skipped one, of a validation."""

    def __init__(
        self,
        config: TrainingConfig,
        optimizer: Optimizer,
        meter: _Meter,
        log: MetricsLog,
        say: Callable[[str], None],
        dpo: DPOLoss | None,
    ) -> None:
        self._config = config
        self._dpo = dpo
        self._optimizer = optimizer
        self._meter = meter
        self._log = log
        self._say = say

    def step(
        self, step: int, loss: float, learning_rate: float, stats: StepStats, num_tokens: Tensor
    ) -> None:
        """Record a step and tell it. Raises RuntimeError: its loss is not a number."""
        # every rank logs the same steps: this is collective
        rewards = self._dpo.rewards() if self._dpo is not None else {}
        record = self._meter.record(step, loss, learning_rate, stats, num_tokens, rewards)
        # every rank logs the same steps: all take part in the collective of `non_finite`, and raise, or none does
        if record.loss != record.loss:
            raise RuntimeError(
                f"the loss of step {record.step - 1} is not a number; not finite in its gradient: "
                f"{self._names_not_finite()}; lower the learning rate"
            )
        self._log.add(record)
        self._say(record.line(self._config.train_steps))
        if record.skipped:
            self._say(self._skipped_line(record, stats))

    def _skipped_line(self, record: StepRecord, stats: StepStats) -> str:
        """Why this step changed nothing, or others since the last line. Collective where names are asked for."""
        scale = self._optimizer.loss_scale
        is_float16 = isinstance(scale, Tensor)
        if spike := stats.spike_in_words():
            return f"step {record.step} was skipped; {spike}"
        if bool(stats.skipped):
            if is_float16:
                # it is normal that the scale is tried, and halved
                steps = f"{record.step:5d}/{self._config.train_steps}"
                return f"step {steps} | skipped: float16 overflow | loss scale {float(scale):g}"
            return f"step {record.step} was skipped; not finite: {self._names_not_finite()}"
        line = f"{record.skipped} steps since the last line were skipped"
        if record.spikes:
            line += f", {record.spikes} of them as spikes of the gradient norm"
        if record.spikes < record.skipped and not is_float16:
            line += f"; not finite: {self._names_not_finite()}"
        return line

    def _names_not_finite(self) -> str:
        """Of gradients of the last skipped step that were not finite; collective."""
        return ", ".join(self._optimizer.non_finite()[:5]) or "the norm"

    def validation(
        self, step: int, validate: Callable[[], Mapping[str, TextLoss]] | None
    ) -> float | None:
        """Record what each text costs; the bits per byte of the main one. Collective, unless `validate` is None."""
        losses = validate() if validate is not None else {}
        for name, text in losses.items():
            record = ValidationRecord(
                step=step + 1,
                name=name,
                loss=text.loss,
                bits_per_byte=None if text.rewards else text.bits_per_byte,
                rewards=text.rewards,
                tokens=text.tokens,
                time=time.time(),
                tokens_seen=self._meter.tokens_seen(step),
            )
            self._say(self._log.add_validation(record).line(self._config.train_steps))
        if MAIN in losses and not losses[MAIN].rewards:
            return losses[MAIN].bits_per_byte
        return None


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and (step + 1) % interval == 0


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
    validate: Callable[[], Mapping[str, TextLoss]] | None = None,
    checkpoints: CheckpointHook | None = None,
    start: int = 0,
    tokens_per_step: int = 0,
    profiler: StepProfiler | None = None,
    experts: Callable[[], Sequence[ExpertLoad]] | None = None,
    dpo: DPOLoss | None = None,
) -> FirstStep:
    """Run steps `start` .. train_steps - 1; `batch_of(step)` gives this rank's rows of the global batch.

    Logs every `log_interval` steps and at both ends, with the part of `peak_flops` (FLOP/s of all devices together,
    `metrics.total_peak_flops`) that the model used; `every_step(step, loss)` moves a progress bar;
    `validate()` evaluates each validation text, every `eval_interval` steps and at the end; `checkpoints` saves, and
    may end the run early. For the records: tokens_per_step of all ranks (0: not told), experts() (collective), how
    evenly the last step used them. profiler: of some steps. dpo: the loss of preferences; default: the next token's.
    Returns what the first step computed. Raises RuntimeError: a NaN loss. ValueError: no step left to run.
    """
    _refuse_no_steps(start, config.train_steps)
    executor.step_index = start  # dropout seeds are a function of the step
    progress, first_step = _Progress(every_step), None
    meter = _Meter(start, flops_per_token, peak_flops, tokens_per_step, experts)
    reporter = _Reporter(config, optimizer, meter, log, say, dpo)
    for step in range(start, config.train_steps):
        learning_rate = optimizer.learning_rate
        batch = _batch(batch_of, step, profiler)
        result, stats = update(executor, optimizer, batch, dpo or next_token_loss, checkpoints)
        num_tokens = result.num_tokens if dpo is None else dpo.tokens(batch)
        meter.add(num_tokens, stats)

        # log: decided by the configuration alone, as validation is collective and only one rank has a progress bar
        last = step == config.train_steps - 1
        is_logged = last or step == start or _is_due(step, config.log_interval)
        is_validated = validate is not None and (last or _is_due(step, config.eval_interval))
        if is_logged or is_validated:  # otherwise nothing waits for the device
            loss = float(result.loss_sum) / max(1, int(result.num_tokens))
            first_step = first_step or FirstStep(loss, float(stats.grad_norm))
            if is_logged:
                reporter.step(step, loss, learning_rate, stats, num_tokens)
        progress.show(step + 1, result.loss)

        begin = time.perf_counter()  # validating and saving are outside of the throughput
        bits = reporter.validation(step, validate if is_validated else None)
        stop = _save(checkpoints, step + 1, last=last, metrics=_metrics(result, bits))
        meter.leave_out(time.perf_counter() - begin)
        if stop:
            break
    assert first_step is not None
    return first_step


def _refuse_no_steps(start: int, train_steps: int) -> None:
    if start >= train_steps:
        raise ValueError(
            f"train_steps={train_steps} leaves nothing to do after step {start}; ask for more"
        )


def _save(
    checkpoints: CheckpointHook | None,
    step: int,
    *,
    last: bool,
    metrics: Mapping[str, SupportsFloat],
) -> bool:
    """Whether the run ends here; a save where one is due."""
    if checkpoints is None:
        return False
    return checkpoints.after_step(step, last=last, metrics=metrics)


def _batch(
    batch_of: Callable[[int], Mapping[str, Tensor]], step: int, profiler: StepProfiler | None
) -> Mapping[str, Tensor]:
    if profiler is not None:
        profiler.before(step)
    with named("data"):
        return batch_of(step)


def update(
    executor: StepExecutor,
    optimizer: Optimizer,
    batch: Mapping[str, Tensor],
    loss_fn: LossFn,
    checkpoints: CheckpointHook | None = None,
) -> tuple[StepResult, StepStats]:
    """One step on this data rank's rows: forward, backward, gradient reduction, then gradient clipping and update.

    Gradients are divided by the tokens (the pairs) of the global batch. `checkpoints` hears when parameters are about
    to change.
    """
    if isinstance(loss_fn, DPOLoss):
        loss_fn.begin()
    optimizer.zero_grad()
    result = executor.step(batch, loss_fn, optimizer.loss_scale)
    if checkpoints is not None:
        checkpoints.before_update()
    with named("optimizer"):
        stats = optimizer.step(num_tokens=result.num_tokens)
    return result, stats


def _metrics(result: StepResult, bits_per_byte: float | None) -> dict[str, SupportsFloat]:
    """By which checkpoints may be kept: `core.training.config` knows the names."""
    metrics: dict[str, SupportsFloat] = {"loss": result.loss}
    if bits_per_byte is not None:
        metrics["validation.bits_per_byte"] = bits_per_byte
    return metrics
