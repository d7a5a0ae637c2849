"""The loss of a batch, and validation in bits per byte."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from core.datasets import IGNORED_LABEL, bits_per_byte
from core.pipeline import LossFn, StepResult


class StepExecutor(Protocol):
    """What the loop needs of an executor (`SingleStage`, `Pipeline`).

    step_index: of the next step; dropout seeds are a function of it.
    """

    step_index: int

    def step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, loss_scale: float | Tensor = 1.0) -> StepResult:
        """Forward and backward of one batch; global sums."""
        ...

    def evaluate(self, batch: Mapping[str, Tensor], loss_fn: LossFn) -> StepResult:
        """Forward only; global sums."""
        ...


def next_token_loss(output: Tensor, microbatch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum of the per-token losses [b, s] that the model gave, number of tokens that count).

    Raises ValueError: a batch without labels.
    """
    if "labels" not in microbatch:
        raise ValueError(f"the batch has {', '.join(microbatch)}, next_token_loss needs 1 more entry: labels [b, s]")
    return output.sum(), (microbatch["labels"] != IGNORED_LABEL).sum()


def evaluate_bits_per_byte(executor: StepExecutor, batches: Iterable[Mapping[str, Tensor]], num_bytes: int) -> float:
    """Summed loss over all batches, per byte of the text they came from. Collective: every rank calls it."""
    total_loss = 0.0  # in nats
    for batch in batches:
        total_loss += float(executor.evaluate(batch, next_token_loss).loss_sum)
    return bits_per_byte(total_loss, num_bytes)
