"""The executor of a model that is whole on every rank: microbatches one after the other."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from core.autograd import GradSync, NullGradSync, StageContext
from core.parallel_state.collectives import all_reduce
from core.parallel_state.random import seeded
from core.parallel_state.state import ParallelState
from core.pipeline.run.step import (
    Batch,
    LossFn,
    StepResult,
    call_loss_fn,
    call_stage,
    check_loss,
    evaluating,
    forward_arguments,
    join_outputs,
    loss_and_tokens,
    parts_of,
    scale_like,
    split_microbatches,
    stage_seed,
    without_autocast,
)


class SingleStage:
    """One step = `num_microbatches` times forward and backward, then the gradients' sum over the replicas.

    The batch given to a rank is its own part of the global one; microbatch m of data rank r has the global
    index r * num_microbatches + m, of which every random number is a function.

    grad_sync: collects and sums the gradients; by default nobody does, and they stay in `.grad`.
    stage: the context that the model's operations hold; by default `model.stage`. Foreign modules draw from
        torch's generator, which is seeded for each microbatch, alike on all tensor ranks, and put back.
    step_index: of the next `step`; set it to resume.
    Raises ValueError: more than one pipeline rank, fewer than one microbatch, a `main_grad` without its owner.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ps: ParallelState,
        num_microbatches: int = 1,
        grad_sync: GradSync | None = None,
        seed: int = 0,
        stage: StageContext | None = None,
    ) -> None:
        if ps.size("pp") > 1:
            raise ValueError(f"SingleStage runs 1 pipeline stage, this grid has {ps.size('pp')}; use pipeline=1")
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches={num_microbatches} must be at least 1")
        if grad_sync is None and any(getattr(p, "main_grad", None) is not None for p in model.parameters()):
            raise ValueError(
                "the model's parameters have a main_grad but grad_sync is None: nobody would sum their gradients "
                "over the replicas; pass the grad_sync that made them"
            )
        own = stage if stage is not None else getattr(model, "stage", None)
        self.model, self.ps, self.num_microbatches, self.seed = model, ps, num_microbatches, seed
        self.grad_sync = grad_sync if grad_sync is not None else NullGradSync()
        self.step_index = 0
        self.stage = own if isinstance(own, StageContext) else StageContext()
        self._arguments = forward_arguments(model)

    def step(self, batch: Batch, loss_fn: LossFn, loss_scale: float | Tensor = 1.0) -> StepResult:
        """Gradients of `loss_scale` x the global sum of `loss_fn`'s losses, added up by `grad_sync`.

        batch: tensors [b, ...], cut along dim 0. loss_fn(output, microbatch) -> (loss_sum, num_tokens), sums
        over the microbatch; nothing divides here, `optimizer.step(num_tokens=...)` does.
        One all-reduce over dp-cp for the result, beside those of `grad_sync`.
        Raises ValueError: a batch that does not divide, a loss that is not one number or has no gradient.
        """
        sync, model = self.grad_sync, self.model
        parts = split_microbatches(batch, self.num_microbatches)
        found = []
        sync.begin_step({p: len(parts) for p in model.parameters() if p.requires_grad})
        try:
            for m, part in enumerate(parts):
                sync.before_forward(model)
                with self._begin(m):
                    output = call_stage(model, part, self._arguments)
                    loss_sum, num_tokens = call_loss_fn(loss_fn, output, part)
                del output  # before backward: the graph holds what it needs
                sync.before_input_grad(model)
                if check_loss(loss_sum, num_tokens):
                    with without_autocast(self.ps.device):
                        loss_sum.backward(scale_like(loss_sum, loss_scale))
                sync.after_input_grad(model)
                sync.after_weight_grad(model)
                found.append(loss_and_tokens(loss_sum, num_tokens, self.ps.device))
        finally:
            self.stage.release()
        sync.stage_done(model)
        sync.finish()
        self.step_index += 1
        return self._result(found)

    def evaluate(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        """The global sums without gradients, in eval mode; any number of rows. One all-reduce over dp-cp."""
        return self._result(
            self._each(
                batch, lambda output, part: loss_and_tokens(*call_loss_fn(loss_fn, output, part), self.ps.device)
            )
        )

    def forward(self, batch: Batch) -> Any:
        """The model's outputs in eval mode without gradients, the microbatches' joined along dim 0.

        Any nesting of tensors; what is not a tensor is taken from the first microbatch. No collective but
        the model's own.
        """
        return join_outputs(self._each(batch, lambda output, part: output))

    def _each(self, batch: Batch, use: Callable[[Any, Any], Any]) -> list[Any]:
        """`use(output, microbatch)` of every microbatch, forward only."""
        used = []
        with evaluating(self.model):
            try:
                for m, part in enumerate(split_microbatches(batch, parts_of(batch, self.num_microbatches))):
                    self.grad_sync.before_forward(self.model)
                    with self._begin(m):
                        used.append(use(call_stage(self.model, part, self._arguments), part))
            finally:
                self.stage.release()
        return used

    def _begin(self, m: int) -> AbstractContextManager[None]:
        """Tell the model's operations where they are; torch's generator is seeded meanwhile, for foreign parts."""
        microbatch = self.ps.index("dp") * self.num_microbatches + m
        self.stage.begin(seed=self.seed, step=self.step_index, microbatch=microbatch)
        return seeded(self.ps.device, stage_seed(self.seed, self.step_index, microbatch))

    def from_last_stage(self, value: Tensor) -> Tensor:
        """`value`: the last stage is here."""
        return value

    def _result(self, found: list[Tensor]) -> StepResult:
        total = all_reduce(torch.stack(found).sum(0), self.ps.group("dp-cp"))
        return StepResult(total[0], total[1])
