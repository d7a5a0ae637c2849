"""The executor of a model that is whole on every rank: microbatches one after the other, gradients accumulated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from core.autograd import GradSync, NullGradSync, StageContext, has_main_grad
from core.parallel_state.collectives import all_reduce
from core.parallel_state.random import default_generator, seeded
from core.parallel_state.state import ParallelState
from core.pipeline.run.arguments import forward_arguments
from core.pipeline.run.checks.loss import LossWatch
from core.pipeline.run.checks.step_numbers import Draws, NumberedSteps, StepNumbers
from core.pipeline.run.checks.sums import SumsWatch
from core.pipeline.run.ranges import named
from core.pipeline.run.step import (
    Batch,
    LossFn,
    StepResult,
    call_loss_fn,
    call_stage,
    check_loss,
    evaluating,
    evaluation_microbatches,
    forward_seed,
    join_outputs,
    loss_and_tokens,
    scale_like,
    split_microbatches,
    stage_seed,
    without_autocast,
)


class SingleStage(NumberedSteps):
    """One step = `num_microbatches` times forward and backward, then the gradients' sum over the replicas.

    A rank is given its own rows of the global batch; microbatch m of data rank r has the global index
    r * num_microbatches + m, of which every random number is a function.

    grad_sync: collects and sums the gradients; by default nobody does, and they stay in `.grad`.
    stage: the context that the model's operations hold; by default `model.stage`. Foreign modules draw from
        torch's generator, which is seeded for each microbatch, alike on all tensor ranks, and restored.
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
            raise ValueError(
                f"SingleStage runs 1 pipeline stage, this grid has {ps.size('pp')}; use pipeline=1"
            )
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches={num_microbatches} must be at least 1")
        owns_gradients = any(has_main_grad(parameter) for parameter in model.parameters())
        if grad_sync is None and owns_gradients:
            raise ValueError(
                "the model's parameters have a main_grad but grad_sync is None: nobody would sum their gradients "
                "over the replicas; pass the grad_sync that made them"
            )
        self.model = model
        self.ps = ps
        self.num_microbatches = num_microbatches
        self.seed = seed
        if grad_sync is not None:
            self.grad_sync = grad_sync
        else:
            self.grad_sync = NullGradSync()
        # our own models carry a context that their operations already hold
        model_context = stage if stage is not None else getattr(model, "stage", None)
        if isinstance(model_context, StageContext):
            self.stage = model_context
        else:
            self.stage = StageContext()
        self._forward_arguments = forward_arguments(model)
        self._numbers = StepNumbers([model], [self.stage])
        self._sums_watch = SumsWatch([model], ps, grad_sync)
        self._loss_watch = LossWatch(ps, [model])

    @property
    def modules(self) -> dict[int, nn.Module]:
        """stage -> module of this rank: all of it is stage 0."""
        return {0: self.model}

    def use_microbatches(self, count: int) -> None:
        """Cut the next batches into so many microbatches, for a batch that grows. Raises ValueError: below 1."""
        if count < 1:
            raise ValueError(f"num_microbatches={count} must be at least 1")
        self.num_microbatches = count

    def step(self, batch: Batch, loss_fn: LossFn, loss_scale: float | Tensor = 1.0) -> StepResult:
        """Gradients of `loss_scale` x the global sum of `loss_fn`'s losses, added up by `grad_sync`.

        batch: tensors [b, ...], cut along dim 0. loss_fn(output, microbatch) -> (loss_sum, num_tokens), sums
        over the microbatch; nothing divides here, `optimizer.step(num_tokens=...)` does.
        One all-reduce over dp-cp for the result, beside those of `grad_sync`.
        Raises ValueError: a batch that does not divide, a loss that is not one number or has no gradient.
        """
        sync = self.grad_sync
        model = self.model
        microbatches = split_microbatches(batch, self.num_microbatches)
        loss_fn = self._loss_watch.around(loss_fn, self.num_microbatches)
        self._sums_watch.before_step()
        sums = []
        draws = self._numbers.begin_step()
        self.stage.loss_scale = loss_scale
        self.stage.begin_step()
        # a gradient is final, and its bucket may be reduced, after one backward per microbatch
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        sync.begin_step(dict.fromkeys(trained, len(microbatches)))
        try:
            for index, microbatch in enumerate(microbatches):
                sync.before_forward(model)
                with named(f"F0.{index}"), self._begin_microbatch(index, draws, self.seed):
                    output = call_stage(model, microbatch, self._forward_arguments)
                    loss_sum, num_tokens = call_loss_fn(loss_fn, output, microbatch)
                # before backward: the graph holds what it needs
                del output
                sync.before_input_grad(model)
                if check_loss(loss_sum, num_tokens):
                    # gradient accumulation: backward adds to the gradients of the microbatches before
                    with named(f"B0.{index}"), without_autocast(self.ps.device):
                        loss_sum.backward(scale_like(loss_sum, loss_scale))
                sync.after_input_grad(model)
                sync.after_weight_grad(model)
                sums.append(loss_and_tokens(loss_sum, num_tokens, self.ps.device))
        finally:
            self.stage.release()
        # all-reduce or reduce-scatter of what is left, then wait for all of it
        with named("sums"):
            sync.stage_done(model)
            sync.finish()
            self.stage.end_step()
        self._numbers.end_step()
        return self._sums_watch.after_step(self._global_result(sums), loss_scale)

    def evaluate(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        """The global sums without gradients, in eval mode; any number of rows. One all-reduce over dp-cp."""

        def evaluate_loss(output: Any, microbatch: Any) -> Tensor:
            loss_sum, num_tokens = call_loss_fn(loss_fn, output, microbatch)
            return loss_and_tokens(loss_sum, num_tokens, self.ps.device)

        return self._global_result(self._forward_each(batch, evaluate_loss))

    def forward(self, batch: Batch, *, microbatches: int | None = None) -> Any:
        """The model's outputs in eval mode without gradients, the microbatches' joined along dim 0.

        microbatches: into how many the batch is cut; default: at most the step's number. Any nesting of tensors; what
        is not a tensor is taken from the first microbatch. No collective but the model's own.
        """
        self._numbers.tell_of_statistics()
        return join_outputs(
            self._forward_each(batch, lambda output, microbatch: output, microbatches)
        )

    def _forward_each(
        self, batch: Batch, use: Callable[[Any, Any], Any], microbatches: int | None = None
    ) -> list[Any]:
        """`use(output, microbatch)` of every microbatch, forward only."""
        results = []
        count = microbatches or evaluation_microbatches(batch, self.num_microbatches)
        seed = forward_seed(self.seed, self._numbers.begin_forward(batch))
        with evaluating(self.model):
            try:
                for index, microbatch in enumerate(split_microbatches(batch, count)):
                    self.grad_sync.before_forward(self.model)
                    with self._begin_microbatch(index, Draws(), seed):
                        output = call_stage(self.model, microbatch, self._forward_arguments)
                        results.append(use(output, microbatch))
                        # not alive beside the next microbatch's
                        del output
            finally:
                self.stage.release()
        return results

    @contextmanager
    def _begin_microbatch(self, index: int, draws: Draws, base: int) -> Iterator[None]:
        """Tell our operations which microbatch runs; torch's generator is seeded meanwhile, for foreign modules."""
        global_index = self.ps.index("dp") * self.num_microbatches + index
        self.stage.begin(seed=base, step=self.step_index, microbatch=global_index)
        seed = stage_seed(base, self.step_index, global_index, context=self.ps.index("cp"))
        # around it: the user's own state comes back
        with seeded(self.ps.device, seed), draws.seeded([default_generator(self.ps.device)], seed):
            yield

    def from_last_stage(self, value: Tensor) -> Tensor:
        """`value`: the last stage is here."""
        return value

    def _global_result(self, sums: list[Tensor]) -> StepResult:
        total = all_reduce(torch.stack(sums).sum(0), self.ps.group("dp-cp"))
        return StepResult(total[0], total[1])
