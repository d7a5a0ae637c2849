"""What `initialize` returns: a model that can train itself."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel
from core.optimizer import ShardedOptimizer
from core.parallel_state import ParallelState
from core.pipeline import LossFn, Pipeline, SingleStage, StepResult
from core.pipeline.run.step import call_loss_fn, call_stage
from core.training.config import TrainingConfig
from core.training.generation import generate
from core.training.resume.batch_plan import cut_as_planned
from core.training.run.checkpoint import Checkpoints
from core.training.run.engine.deepspeed_face import EngineFace
from core.training.run.loader import Loader, Scheduler, moved_to
from core.training.run.loop import update


@dataclass(frozen=True, eq=False)
class TrainStep:
    """The numbers of one `train_step`: tensors of shape [], equal on all ranks; `float(...)` waits for the device.

    loss: mean over the valid tokens of the global batch. grad_norm: global, before clipping. skipped: no update.
    """

    loss: Tensor
    num_tokens: Tensor
    grad_norm: Tensor
    learning_rate: float
    skipped: Tensor


class TrainingModel(EngineFace):
    """A model, or this rank's pipeline stages, with what one optimizer step over it needs.

    Called, it is the module itself, for a loop of your own: `model.loss(batch).backward(); optimizer.step();
    optimizer.zero_grad()`. `train_step(batch)` does the same for every layout, microbatch by
    microbatch. module: what it wraps (a ModuleDict of stages by number where this rank has several). lr_scheduler:
    the schedule as an object. A loop of DeepSpeed's runs too: see `EngineFace`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        optimizer: ShardedOptimizer,
        executor: SingleStage | Pipeline,
        checkpoints: Checkpoints,
        loss_fn: LossFn,
        training: TrainingConfig,
    ) -> None:
        super().__init__()
        self.module: nn.Module
        if isinstance(executor, SingleStage):
            (self.module,) = stages.values()
        else:
            self.module = nn.ModuleDict({str(index): stage for index, stage in stages.items()})
        self.stages = dict(stages)
        self.optimizer = optimizer
        self.executor = executor
        self.checkpoints = checkpoints
        self.loss_fn = loss_fn
        self.training_config = training
        self._owns_signals = False
        # gradient accumulation: microbatches of one update on one rank
        rows_per_replica = training.global_batch_size // self.dp_world_size
        self.accumulation = rows_per_replica // training.micro_batch_size
        self.lr_scheduler = Scheduler(optimizer)
        self.loader: Loader | None = None
        self._move = moved_to(self.parallel.device)

    @property
    def parallel(self) -> ParallelState:
        """The layout of ranks, and which of them this process is."""
        return self.optimizer.ps

    @property
    def shard(self) -> DataParallel:
        """Where its gradients are summed, and its weights held."""
        return self.optimizer.shard

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The wrapped module's output. Raises ValueError: this rank holds stages of a pipeline, not a model."""
        self._refuse_stages()
        return self.module(*inputs, **named)

    def _refuse_stages(self) -> None:
        if isinstance(self.executor, Pipeline):
            count = len(list(self.module.children()))
            raise ValueError(
                f"this rank holds {count} stages of a pipeline over "
                f"{self.parallel.size('pp')} ranks, which cannot be called alone; use train_step(batch) and "
                "evaluate(batch), or pipeline=1"
            )

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean loss of this rank's valid tokens, for a loop of your own: `model.loss(batch).backward()`.

        Labels of -100 count for nothing (an epoch's last sample is filled up with them), also not in the divisor. The
        gradient of float16 weights carries `optimizer.loss_scale`, which `optimizer.step` takes out again.
        Raises ValueError: as calling it; a batch without what `loss_fn` needs.
        """
        # the mean of this rank's tokens: the optimizer averages over the data ranks
        self._refuse_stages()
        batch = self._move(batch)
        output = call_stage(self.module, batch)
        loss_sum, num_tokens = call_loss_fn(self.loss_fn, output, batch)
        # a rank may hold padding only: 0 tokens, a loss of 0
        loss = loss_sum / torch.as_tensor(num_tokens, device=loss_sum.device).clamp(min=1)
        scale = self.optimizer.loss_scale
        if isinstance(scale, Tensor) and loss.requires_grad:
            # the loss itself stays unscaled
            loss.register_hook(self._scale_gradient)
        return loss

    def _scale_gradient(self, gradient: Tensor) -> Tensor:
        scale = self.optimizer.loss_scale
        # `backward` of DeepSpeed's loops scales by itself
        if self._in_backward or not isinstance(scale, Tensor):
            return gradient
        return gradient * scale.to(gradient.dtype)

    def train_step(self, batch: Mapping[str, Tensor]) -> TrainStep:
        """Forward, backward and update on this data rank's rows `[b/dp, ...]` of the global batch.

        The loss is summed over all valid tokens of all ranks and divided once. Afterwards it saves if the run's
        `checkpoint` says that it is time; after SIGTERM or Ctrl-C at once, and the loader ends. A loop of your own
        that goes on from here begins with `optimizer.zero_grad()`.
        Collectives: those of the executor and of `optimizer.step`.
        Raises ValueError: rows that do not divide into the microbatches, a batch without what `loss_fn` needs.
        """
        # SIGTERM and Ctrl-C end this loop from its first step on
        if not self._owns_signals:
            self._owns_signals = True
            self.checkpoints.__enter__()
        # dropout seeds are a function of it, also after a resume
        self.executor.step_index = self.global_steps
        learning_rate = self.optimizer.learning_rate
        cut_as_planned(
            self.executor,
            self.checkpoints.plan,
            self.global_steps,
            self.training_config,
            self.dp_world_size,
        )
        result, stats = update(
            self.executor, self.optimizer, self._move(batch), self.loss_fn, self.checkpoints
        )
        self._last_stats = stats
        # checkpoints, and the end of the run after SIGTERM
        steps = self.global_steps
        self.micro_steps = steps * self.gradient_accumulation_steps()
        last = steps == self.training_config.train_steps
        self.checkpoints.after_step(steps, last=last, metrics={"loss": result.loss})
        return TrainStep(
            result.loss, result.num_tokens, stats.grad_norm, learning_rate, stats.skipped
        )

    def evaluate(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Global loss sum and number of tokens of a batch, without gradients, in eval mode. Collective."""
        return self.executor.evaluate(self._move(batch), self.loss_fn)

    def averaged(self) -> AbstractContextManager[None]:
        """`with model.averaged(): model.evaluate(batch)`: with the average of the weights. Collective.

        Raises ValueError: `optimizer.ema_decay` is 0.
        """
        # a save under way reads the weights
        self.checkpoints.before_update()
        return self.optimizer.averaged()

    def generate(
        self, prompt: list[int], new_tokens: int, *, temperature: float = 0.0, seed: int = 0
    ) -> list[int]:
        """`prompt` and up to `new_tokens` more, the same on every rank; see `core.training.generate`. Collective.

        Raises ValueError: a model that is no GPT, a prompt that is empty or too long.
        """
        first = self.stages[min(self.stages)]
        if not isinstance(first, GPTModel):
            raise ValueError(
                f"generate needs a GPTModel, this is a {type(first).__name__}; use model(...)"
            )
        return generate(
            first,
            prompt,
            new_tokens=new_tokens,
            temperature=temperature,
            seed=seed,
            executor=self.executor,
        )

    def close(self) -> None:
        """Wait for saves under way and give the checkpoint directory back to other runs; done at exit too."""
        self.checkpoints.close()
