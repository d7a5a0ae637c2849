"""The loss of a batch, and of a text: per token, and in bits per byte."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from core.datasets import IGNORED_LABEL, PreferenceBatches, bits_per_byte
from core.optimizer import ShardedOptimizer
from core.parallel_state import ParallelState
from core.pipeline import LossFn, StepResult
from core.training.config.data import OF_AVERAGE
from core.training.preferences.loss import DPOLoss
from core.training.preferences.reference import Preferences
from core.training.run.data import Corpus
from core.training.run.loader import local_batches

PROGRESS_S = 10.0  # between two lines about a long validation


class StepExecutor(Protocol):
    """What the loop needs of an executor (`SingleStage`, `Pipeline`).

    step_index: of the next step; dropout seeds are a function of it.
    """

    step_index: int

    def step(
        self, batch: Mapping[str, Tensor], loss_fn: LossFn, loss_scale: float | Tensor = 1.0
    ) -> StepResult:
        """Forward and backward of one batch; global sums."""
        ...

    def evaluate(self, batch: Mapping[str, Tensor], loss_fn: LossFn) -> StepResult:
        """Forward only; global sums."""
        ...


def next_token_loss(output: Tensor, microbatch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum of the per-token losses [b, s] that the model gave, number of tokens that count).

    Raises ValueError: a batch without labels, an output that is no loss per label.
    """
    if "labels" not in microbatch:
        raise ValueError(
            f"the batch has {', '.join(microbatch)}, next_token_loss needs 1 more entry: labels [b, s]"
        )
    labels = microbatch["labels"]
    # the sum of logits, or of one mean, would be a loss too
    if not isinstance(output, Tensor) or not output.dim() or output.numel() > labels.numel():
        given = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"the model gave {given} for labels {list(labels.shape)}, and next_token_loss takes 1 loss per label; "
            "return F.cross_entropy(logits.transpose(1, 2), labels, reduction='none'), or give a loss_fn(output, "
            "microbatch) -> (sum of losses, number of tokens)"
        )
    return output.sum(), (labels != IGNORED_LABEL).sum()


@dataclass(frozen=True)
class TextLoss:
    """What a model paid for a text: `loss_sum` in nats, over `tokens` labels that stand for `num_bytes` bytes.

    rewards: of preferences, by TRL's names; their loss is over `tokens` pairs, and has no bytes.
    """

    loss_sum: float
    tokens: int
    num_bytes: int
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean over the labels, in nats per token, or over the pairs."""
        return self.loss_sum / max(1, self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers. Raises ValueError: a text of 0 bytes."""
        return bits_per_byte(self.loss_sum, self.num_bytes)


def evaluate_text(
    executor: StepExecutor,
    batches: Iterable[Mapping[str, Tensor]],
    num_bytes: int,
    dpo: DPOLoss | None = None,
) -> TextLoss:
    """Forward over all batches of a text of so many bytes, or of preferences. Collective: every rank calls it."""
    if dpo is not None:
        dpo.begin()
    loss_sum = 0.0
    tokens = 0
    for batch in batches:
        result = executor.evaluate(batch, dpo or next_token_loss)
        loss_sum = loss_sum + float(result.loss_sum)
        tokens = tokens + int(result.num_tokens)
    return TextLoss(loss_sum, tokens, num_bytes, dpo.rewards() if dpo is not None else {})


def evaluate_bits_per_byte(
    executor: StepExecutor, batches: Iterable[Mapping[str, Tensor]], num_bytes: int
) -> float:
    """Summed loss over all batches, per byte of the text they came from. Collective: every rank calls it."""
    return evaluate_text(executor, batches, num_bytes).bits_per_byte


def evaluate_texts(
    executor: StepExecutor,
    corpus: Corpus,
    ps: ParallelState,
    preferences: Preferences | None = None,
) -> dict[str, TextLoss]:
    """Name -> loss of each validation text of a corpus, or of its preferences. Collective."""
    to_device = local_batches(ps)
    rank = ps.index("dp")
    size = ps.size("dp")
    losses = {}
    # in the same order on all ranks: each text is a collective
    for name, text in corpus.validation_texts.items():
        batches = _with_progress(
            text.validation(rank, size), name, text.validation_batches if ps.rank == 0 else 0
        )
        if preferences is not None:
            assert isinstance(text.valid, PreferenceBatches)
            pairs = map(preferences.references.attach(text.valid), batches)
            losses[name] = evaluate_text(executor, map(to_device, pairs), 0, preferences.loss)
            continue
        losses[name] = evaluate_text(executor, map(to_device, batches), len(text.valid_text))
    return losses


def _with_progress(
    batches: Iterable[Mapping[str, Tensor]], name: str, count: int, seconds: float = PROGRESS_S
) -> Iterator[Mapping[str, Tensor]]:
    """The batches; of a long text a line on standard error now and then. count: 0 tells nothing."""
    begin = last = time.monotonic()
    for number, batch in enumerate(batches):
        now = time.monotonic()
        # by time, not by number: a batch may take seconds
        if count and now - last >= seconds:
            last = now
            remaining_s = 0.0
            if number:
                remaining_s = (now - begin) / number * (count - number)
            line = f"{name}: batch {number:,} of {count:,}, {remaining_s:.0f} s left"
            print(line, file=sys.stderr, flush=True)
        yield batch


def validate(
    executor: StepExecutor,
    corpus: Corpus,
    ps: ParallelState,
    optimizer: ShardedOptimizer,
    preferences: Preferences | None = None,
) -> dict[str, TextLoss]:
    """As `evaluate_texts`; where weights are averaged also of the average, as NAME.ema. Collective."""
    losses = evaluate_texts(executor, corpus, ps, preferences)
    if optimizer.averages:
        # the average takes the place of the weights meanwhile, on all ranks
        with optimizer.averaged():
            averaged = evaluate_texts(executor, corpus, ps, preferences)
        losses |= {f"{name}{OF_AVERAGE}": text for name, text in averaged.items()}
    return losses
