"""Which rows of the run's order each step takes: a pure function of the step, also with a batch that grows."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor

from core.training.config import TrainingConfig
from core.training.run.data import BatchSource


class BatchPhase(NamedTuple):
    """Steps of one batch size, from `step` on, whose first row is number `row`."""

    step: int
    row: int
    size: int


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Batches of `global_batch_size` rows, one after the other in the order of the data.

    start_step, start_row: where a run that goes on begins; its steps before that had other batches. ramp: (rows at
    first, rows that are added each time, rows over which it grows), Megatron's rampup_batch_size.
    """

    global_batch_size: int
    start_step: int = 0
    start_row: int = 0
    ramp: tuple[int, int, int] | None = None

    @cached_property
    def phases(self) -> tuple[BatchPhase, ...]:
        """In the order of their steps; the last one has no end."""
        phases = list[BatchPhase]()
        step = self.start_step
        row = self.start_row
        for end, size in self._sizes():
            if row >= end:
                continue
            phases.append(BatchPhase(step, row, size))
            # the step in which the size grows is still of the smaller one
            steps = -(-(end - row) // size)
            step = step + steps
            row = row + steps * size
        return (*phases, BatchPhase(step, row, self.global_batch_size))

    def _sizes(self) -> list[tuple[int, int]]:
        """(row at which it ends, size) of each smaller size."""
        if self.ramp is None:
            return []
        first, increment, rows = self.ramp
        # as Megatron: each size lasts for an equal share of the rows
        increments = -(-(self.global_batch_size - first) // increment)
        return [(rows * (i + 1) // increments, first + i * increment) for i in range(increments)]

    def _phase(self, step: int) -> BatchPhase:
        index = bisect_right([phase.step for phase in self.phases], step) - 1
        if index < 0:
            raise ValueError(
                f"step {step} lies before step {self.start_step}, where this plan of batches begins"
            )
        return self.phases[index]

    def size(self, step: int) -> int:
        """Rows of the global batch of a step."""
        return self._phase(step).size

    def first_row(self, step: int) -> int:
        """Rows that the steps before took. Raises ValueError: a step before the plan's first."""
        phase = self._phase(step)
        return phase.row + (step - phase.step) * phase.size

    def is_even(self, step: int) -> bool:
        """Whether every step, those before too, takes `global_batch_size` rows."""
        return self.ramp is None and self.first_row(step) == step * self.global_batch_size


class Cuts(Protocol):
    """An executor that cuts batches into any number of microbatches."""

    def use_microbatches(self, count: int) -> None:
        """From the next step on. Collective."""
        ...


def cut_as_planned(
    executor: Cuts, plan: BatchPlan, step: int, training: TrainingConfig, data_ranks: int
) -> None:
    """Have the executor cut the batch of this step into microbatches of the run's size. Collective where it grows."""
    if plan.ramp is not None:
        executor.use_microbatches(plan.size(step) // (training.micro_batch_size * data_ranks))


class PlannedBatches:
    """A source's batches as the plan of the moment has them; `plan()` may change when a checkpoint is loaded."""

    def __init__(self, source: BatchSource, plan: Callable[[], BatchPlan]) -> None:
        self.source = source
        self._plan = plan

    def batch(self, step: int, rank: int = 0, size: int = 1) -> Mapping[str, Tensor]:
        """The rows of data rank `rank` of `size` in a step. Raises ValueError: a source that knows steps only."""
        plan = self._plan()
        first = plan.first_row(step)
        count = plan.size(step)
        # the common case, which a source that knows only steps can serve
        if (first, count) == (step * plan.global_batch_size, plan.global_batch_size):
            return self.source.batch(step, rank, size)
        rows: Callable[..., Mapping[str, Tensor]] | None = getattr(self.source, "rows", None)
        if rows is None:
            raise ValueError(
                f"step {step} begins at row {first} with {count} rows, and {type(self.source).__name__} has batches "
                f"of {plan.global_batch_size} only: give it a method rows(first, count, rank, size), or leave the "
                "batch size as it was"
            )
        return rows(first, count, rank, size)
