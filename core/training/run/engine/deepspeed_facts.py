"""What programs ask DeepSpeed's engine about a run: counts, sizes, rates, ranks."""

import os
from typing import Any

import torch
from torch import nn

from core.optimizer import ShardedOptimizer, StepStats
from core.training.config import TrainingConfig
from core.training.run.loader import Loader


class EngineFacts(nn.Module):
    """Of `EngineFace`, by DeepSpeed's names."""

    optimizer: ShardedOptimizer
    loader: Loader | None
    training_config: TrainingConfig
    accumulation: int

    def __init__(self) -> None:
        super().__init__()
        self._last_stats: StepStats | None = None

    @property
    def global_steps(self) -> int:
        """Optimizer steps made so far, also by earlier runs that this one resumed."""
        return self.optimizer.step_count

    @property
    def global_samples(self) -> int:
        """Rows that these steps have read."""
        return self.global_steps * self.train_batch_size()

    @property
    def skipped_steps(self) -> int:
        """How many of them were skipped (waits for the device)."""
        return self.optimizer.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last update was not skipped (waits for the device)."""
        return self._last_stats is not None and not bool(self._last_stats.skipped)

    def get_global_grad_norm(self) -> float | None:
        """Of the last update, before clipping (waits for the device); None before the first."""
        if self._last_stats is None:
            return None
        return float(self._last_stats.grad_norm)

    def get_lr(self) -> list[float]:
        """The learning rate of the next update, of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """The rate of every param group from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """`betas` of each param group, or SGD's `momentum`; 0.0 of one that has none."""
        key = "momentum" if self.optimizer_name() == "sgd" else "betas"
        return [group.get(key, 0.0) for group in self.optimizer.param_groups]

    def optimizer_name(self) -> str:
        """`OptimizerConfig.optimizer`."""
        return self.optimizer.config.optimizer

    def get_batch_info(self) -> tuple[int, int, int]:
        """`train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`."""
        per_rank = self.train_micro_batch_size_per_gpu()
        return self.train_batch_size(), per_rank, self.gradient_accumulation_steps()

    def fp16_enabled(self) -> bool:
        """Whether weights are float16."""
        return self._has_weights_of(torch.float16)

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bfloat16."""
        return self._has_weights_of(torch.bfloat16)

    def _has_weights_of(self, dtype: torch.dtype) -> bool:
        return any(buffer.weights.dtype == dtype for buffer in self.optimizer.shard.buffers)

    def train_batch_size(self) -> int:
        """Rows of an update over all data ranks."""
        return self.training_config.global_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows of one forward on one rank."""
        return self.train_batch_size() // self.dp_world_size // self.accumulation

    def gradient_accumulation_steps(self) -> int:
        """Forwards of one update; 1 where the configuration, a mapping, does not say `training.micro_batch_size`."""
        return self.accumulation

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3, under DeepSpeed's name."""
        return self.optimizer.shard.zero_stage

    def zero_optimization(self) -> bool:
        """Whether anything is divided over the data ranks."""
        return self.zero_optimization_stage() > 0

    def gradient_clipping(self) -> float:
        """Largest global norm; 0: none."""
        return self.optimizer.config.clip_grad

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.optimizer.ps.device

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self.optimizer.ps.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its machine, as torchrun says; alone 0."""
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        world = self.optimizer.ps.world
        if world is None:
            return 1
        return world.size

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.optimizer.ps.size("dp")

    @property
    def mp_world_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.optimizer.ps.size("tp")

    @property
    def training_dataloader(self) -> Loader | None:
        """The loader of `initialize`."""
        return self.loader

    def empty_partition_cache(self) -> None:
        """Does nothing: weights of ZeRO-3 are freed after each use."""

    def destroy(self) -> None:
        """`close`, under DeepSpeed's name; memory goes with the last reference."""
        self.close()

    def close(self) -> None:
        raise NotImplementedError
