"""What an optimizer's checkpoint holds: states by name, the counts that steps depend on, and how both come back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.optimizer.averages import Averages
from core.optimizer.groups import Groups
from core.optimizer.state.sharded_states import (
    OptimizerShard,
    States,
    checkpoint_states,
    load_states,
    optimizer_shards,
)
from core.optimizer.state.state_buffers import StateBuffer, opened, state_bytes
from core.optimizer.step.loss_scale import LossScale
from core.optimizer.step.reached import Reached
from core.optimizer.step.skips import Skips
from core.optimizer.step.spikes import Spikes
from core.optimizer.torch_face import TorchFace
from core.parallel_state.state import ParallelState


class SavedStates(Averages, TorchFace):
    """States and counts of a `ShardedOptimizer`, out and in again."""

    ps: ParallelState
    _groups: Groups
    _state_buffers: list[StateBuffer]
    _opened: list[StateBuffer] | None
    _reached: Reached
    _skips: Skips
    _spikes: Spikes
    _scaler: LossScale | None
    _step: Tensor

    @property
    def skipped_steps(self) -> int:
        """How many of `step_count` were skipped (waits for the device)."""
        return self._skips.count

    @property
    def rate_step(self) -> int:
        """What the rate follows: `step_count`; of float16 under DeepSpeed's schedules without the skipped ones."""
        if self._scaler is not None and self._groups.leaves_out_skipped:
            return self.step_count - self.skipped_steps
        return self.step_count

    def _recut(self) -> None:
        raise NotImplementedError

    def _to_weights(self, *, all_buffers: bool = False) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def reload_parameters(self) -> None:
        """Take the main weights, and their average, from the weights again, after these were changed by hand."""
        for state_buffer in self._state_buffers:
            if state_buffer.main is not None:
                state_buffer.main.copy_(state_buffer.weights)
        self.begin_average()

    def states(self, *, own_mains: bool = True) -> dict[str, dict[str, OptimizerShard]]:
        """name -> kind ("main" and the update's) -> this rank's shard; live views, at stage 0 of full local tensors,
        else of intervals. A parameter that an offload's fraction cuts is a joined copy in host memory, and so is what
        is quantized, as numbers of the main weights' dtype.

        own_mains: "main" also of weights that are their own main weights.
        With `step_count`, `skipped_steps` and the loss scale this is everything that a step depends on.
        """
        self._refuse_lent("its states would be those of other weights")
        full_shapes = self.shard.zero_stage == 0
        shards = optimizer_shards(
            opened(self._state_buffers), self.ps, full_shapes=full_shapes, own_mains=own_mains
        )
        for name, kinds in self.whole_states().items():
            shards.setdefault(name, {}).update(kinds)
        return shards

    def whole_states(self) -> dict[str, dict[str, OptimizerShard]]:
        """name -> kind -> a state that is not one number per element; live, and the same on all ranks of a group."""
        return {}

    def memory(self) -> tuple[int, int]:
        """Bytes of the states and main weights: on the weights' device, and offloaded."""
        on_device, offloaded = state_bytes(self._state_buffers)
        return on_device + self.whole_bytes, offloaded

    @property
    def whole_bytes(self) -> int:
        """Of `whole_states`."""
        shards = [shard for kinds in self.whole_states().values() for shard in kinds.values()]
        return sum(shard.tensor.numel() * shard.tensor.element_size() for shard in shards)

    def sharded_state_dict(self) -> dict[str, Any]:
        """All states and counts, for `dist_checkpointing.save` and `load`; live memory.

        Weights that are their own main weights are saved with the model only. After a load call
        `load_state_dict(state)`. What is quantized is copied, in the main weights' dtype, into host memory that is
        kept until the next step; `load_state_dict` quantizes it again.
        """
        self._refuse_lent("a checkpoint would hold it as the weights")
        # one checkpoint for all pipeline ranks: it holds the counts of every stage
        counts = self._counts(self._reached.of_all_stages())
        self._opened = opened(self._state_buffers)
        return checkpoint_states(self._opened, self.shard, counts, self.whole_states())

    def _counts(self, behind: Mapping[str, int] | None = None) -> dict[str, Any]:
        steps: Any = self.step_count
        if behind is None:
            behind = self._reached.behind
        # an integer where it says all, as most checkpoints do
        groups = self._groups.changed()
        norms = self._spikes.state()
        if groups or behind or norms:
            steps = {"steps": steps, "behind": behind, "groups": groups, **norms}
        counts = {"step_count": steps, "skipped_steps": self.skipped_steps}
        if self._scaler is not None:
            counts["loss_scale"] = self._scaler.state()
        return counts

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave on this rank at the same layout; or, after a checkpoint filled the memory that
        `sharded_state_dict` named, the counts from `state`.

        Weights stay as they are, a model is loaded by itself; but `shard.publish()` sends them to all ranks.
        Raises ValueError: another rank's shard.
        """
        # what `state_dict` gave; the other form is a sharded checkpoint's
        if "local" in state or "step_count" not in state:
            self.load_local(state)
            return
        if self._opened is not None:
            self._take(self._opened)
        self._resume(state["step_count"], state["skipped_steps"])
        if self._scaler is not None:
            self._scaler.load(state["loss_scale"])
        self.shard.publish()

    @torch.no_grad()
    def load_states(
        self, states: States, step_count: int, skipped_steps: int = 0, *, weights: bool = True
    ) -> None:
        """Restore what `states` gave at the same layout, bit for bit; `weights`, from "main", or none of them.

        Raises ValueError, before anything is written: names, kinds or shapes that are not this rank's.
        """
        full_shapes = self.shard.zero_stage == 0
        written = opened(self._state_buffers)
        load_states(
            written,
            self.ps,
            states,
            self.whole_states(),
            full_shapes=full_shapes,
            own_mains=weights,
        )
        self._take(written)
        self._resume(step_count, skipped_steps)
        if weights:
            self._to_weights(all_buffers=True)
        self.shard.publish()

    def _take(self, written: list[StateBuffer]) -> None:
        """Quantize what was written into copies of states."""
        for state_buffer, copies in zip(self._state_buffers, written, strict=True):
            state_buffer.take_opened(copies)
        self._opened = None

    def _resume(self, step_count: Any, skipped_steps: int) -> None:
        if isinstance(step_count, Mapping):
            counts = step_count
        else:
            counts = {"steps": step_count}
        self.step_count = int(counts["steps"])
        self._reached.load(counts.get("behind", {}))
        self._recut()
        self._skips.begin_at(skipped_steps)
        self._spikes.load(counts.get("norms", ()))
        if counts.get("groups"):
            self._groups.load(counts["groups"], step=self.rate_step)
        else:
            self._groups.follow(self.rate_step)
        # of a checkpoint by torch's AdamW
        self._groups.take_rates(counts.get("rates", {}))
        self._step.fill_(self.step_count - skipped_steps)
