"""The learning rate schedule as an object, and global batches as an iterator of this rank's rows."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from core.optimizer import ShardedOptimizer
from core.parallel_state import ParallelState
from core.parallel_state.by_hand.batches import followed_as
from core.parallel_state.context import context_batch
from core.parallel_state.documents import mark_documents
from core.pipeline.run.step import split_microbatches
from core.training.run.data import BatchSource


class Scheduler:
    """The learning rate of an optimizer that counts its own steps: read it here, or hand it to torch's optimizers.

    The rate follows the number of updates that the optimizer made (`optimizer.rate_step`); `step()` exists so that
    existing loops run, and does nothing.
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        self._rates = optimizer.config.learning_rate

    def at(self, step: int) -> float:
        """The rate of the update before which `step` updates were made."""
        return self._rates.at(step)

    def step(self) -> None:
        """Does nothing: the optimizer counts its own steps."""

    def get_last_lr(self) -> list[float]:
        """The rate of the last update (of the first one, before it), as torch's schedulers give it."""
        return [self.at(max(0, self.optimizer.rate_step - 1))]

    def for_optimizer(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The same schedule for one of torch's optimizers, whose `step()` does count: a LambdaLR."""
        # LambdaLR multiplies the initial rate by the function: 1 makes the function the rate itself
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 1.0
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.at)

    def state_dict(self) -> dict[str, Any]:
        """Empty: the optimizer's checkpoint has the count."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing: the rate is a function of the optimizer's count."""


class Loader:
    """This data rank's rows of global batch `step`, `step + 1`, ... up to `train_steps`, on its device.

    The order is a function of (seed, step): `step`, the number of the next batch, is all that resuming needs. It ends
    early where `stopped()` says so. microbatches: into how many `microbatches()` cuts a batch. gave_whole: whether
    the last batch was yielded uncut.
    """

    def __init__(
        self,
        batches: BatchSource,
        ps: ParallelState,
        train_steps: int,
        step: int = 0,
        stopped: Callable[[], bool] = lambda: False,
        microbatches: int = 1,
    ) -> None:
        self.gave_whole = False
        self._microbatches = microbatches
        self.batches = batches
        self.train_steps = train_steps
        self.step = step
        self.stopped = stopped
        self._data_rank = ps.index("dp")
        self._data_size = ps.size("dp")
        # context ranks of one data rank read the same rows, and keep their part of each
        self._to_device = local_batches(ps)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        # `stopped` is asked before every batch: after SIGTERM the loop ends where all ranks end
        while self.step < self.train_steps and not self.stopped():
            # before the batch is yielded: a loop that stops in the middle has used it
            self.step += 1
            self.gave_whole = True
            yield self.batch(self.step - 1)

    def microbatches(self) -> Iterator[dict[str, Tensor]]:
        """The same batches, cut into the microbatches of an update, for `backward` and `step` after each."""
        for batch in self:
            self.gave_whole = False
            for microbatch in split_microbatches(batch, self._microbatches):
                mark_documents(microbatch)
                yield microbatch

    def __len__(self) -> int:
        """Batches that remain until `train_steps`."""
        return max(0, self.train_steps - self.step)

    def batch(self, step: int) -> dict[str, Tensor]:
        """This rank's rows of global batch number `step`; does not move `self.step`."""
        return self._to_device(self.batches.batch(step, self._data_rank, self._data_size))

    def state_dict(self) -> dict[str, int]:
        """The number of the next batch."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue with the batch of this number."""
        self.step = int(state["step"])


def moved_to(device: torch.device) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """A function that moves a batch to `device`, beside what runs there; where documents begin stays on the host,
    which chooses by it what attention computes."""

    def moved(x: Tensor) -> Tensor:
        if device.type == "cpu" or x.device.type != "cpu":
            return x.to(device)
        # a copy of pageable memory would stop the host; an expanded tensor cannot be pinned
        return followed_as(x, x.contiguous().pin_memory().to(device, non_blocking=True))

    def move(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        there = {name: x if name == "document_begin" else moved(x) for name, x in batch.items()}
        mark_documents(there)
        return there

    return move


class NoBatches(Loader):
    """In the place of a loader where nothing is read: false, and told where somebody iterates."""

    def __init__(self) -> None:
        """Reads nothing."""

    def __bool__(self) -> bool:
        return False

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(
            "initialize was given a model of your own and 0 batches, so its loader has none; iterate over your own "
            "data, or write initialize(model, config, batches=...) with an object that has batch(step, rank=0, "
            "size=1) -> this rank's rows of global batch number `step`"
        )

    __iter__ = __next__ = __len__ = microbatches = _refuse


def local_batches(ps: ParallelState) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """A function that cuts this context rank's rows out of a batch of whole sequences, and moves them."""
    move = moved_to(ps.device)
    return lambda batch: move(context_batch(batch, ps))
