"""One optimizer step over flat buffers: each rank updates its shard, with one fused call per group of options.

This is mixed-precision training with float32 main (master) weights and ZeRO's divided optimizer states
(arXiv 1910.02054): unscaling, averaging and gradient clipping are one factor inside the fused update.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.data_parallel import DataParallel
from core.optimizer.averages import Averages
from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import GroupOptions, Groups
from core.optimizer.state.flat_shard import (
    Decays,
    Span,
    UpdateKey,
    default_decays,
    everything_decays,
)
from core.optimizer.state.kernels import Batch, Factor, Kernel
from core.optimizer.state.main_dtype import main_dtype
from core.optimizer.state.offload import Offload
from core.optimizer.state.rounding import Rounding
from core.optimizer.state.sharded_states import (
    OptimizerShard,
    States,
    checkpoint_states,
    load_states,
    optimizer_shards,
)
from core.optimizer.state.state_buffers import (
    StateBuffer,
    allocate_states,
    make_state_buffers,
    state_bytes,
)
from core.optimizer.state.streamed import Streamer
from core.optimizer.step.loss_scale import LossScale
from core.optimizer.step.reached import Reached
from core.optimizer.step.skips import Skips
from core.optimizer.step.spikes import Spikes
from core.optimizer.step.step_stats import CLIP_EPS, StepStats
from core.optimizer.step.watch import GradientWatch
from core.optimizer.torch_face import TorchFace
from core.parallel_state.layout import Layout


class ShardedOptimizer(Averages, TorchFace):
    """An update (`kernel`) over the flat buffers of a `DataParallel`, at any ZeRO stage and in one process, too.

    A torch.optim.Optimizer: param_groups, schedulers, closures, hooks and `zero_grad` mean what they do there.
    Subclasses say which update with which options and states. Weights of 16 bits have float32 main weights, others
    are their own; weights that somebody else writes (`load_state_dict`, by hand) are adopted. A parameter without a
    gradient on any rank is left out of the update, as in torch. At every ZeRO stage and however buckets are cut,
    float32 parameters get the same bits: the norm is summed per rank in float64 in rank order, and cuts lie at
    multiples of 64 elements.

    shard: a `DataParallel`. decays(name, layout): which parameters decay; by default all of two or more dims that are
        not biases. offload: which states live in host memory or on disk. groups: see `Groups`; parameters of none
        have the configuration's options.
    step_count: calls of `step`, skipped ones included; the configuration's schedule reads it.

    Collective when it is made. Raises ValueError: main weights of float32 and float64 in one optimizer;
    main_params=False with float16; complex parameters.
    """

    kernel: Kernel  # the fused update, a static method

    def __init__(
        self,
        shard: DataParallel,
        config: OptimizerConfig,
        *,
        decays: Decays | None = None,
        offload: Offload | None = None,
        groups: GroupOptions = (),
    ) -> None:
        self.shard, self.ps, self.config = shard, shard.ps, config
        self.step_count = 0
        self._gradients_used = False
        device = self.ps.device

        # Options: param groups, and who decays.
        if decays is None and config.weight_decay_of == "all":
            decays = everything_decays
        self._groups = Groups(shard, config, self.options(config), groups, spares=decays is None)
        self._face(self._groups.all, self.options(config))
        self._decays = decays if decays is not None else default_decays

        # States: main weights and moments of the elements that this rank updates.
        self._dtype = main_dtype(shard, config)
        self._reached = Reached(shard, self.ps)
        self._state_buffers = make_state_buffers(
            shard, kinds_of=self.states_of, key_of=self._key_of, offload=offload
        )
        allocate_states(
            self._state_buffers, self._dtype, offload, self.ps.rank, main_params=config.main_params
        )
        self._batches: dict[UpdateKey, Batch] | None = None
        self._begin_average(self._state_buffers, config.ema_decay)

        # Counts and flags stay on the device, so that no step waits for it.
        self._step = torch.zeros((), device=device)
        self._skips = Skips(config.max_skipped_steps, device)
        self._spikes = Spikes(config.skip_grad_norm_above, config.skip_window, device)
        self._watch = GradientWatch(shard.buffers, self.ps)
        self._rounding = Rounding(config.rounding_seed, self.ps.coordinate, self.ps.sizes)
        self._streamer = Streamer(device, self._apply, self._round_stochastically)
        self._scaler: LossScale | None = None
        if any(buffer.weights.dtype == torch.float16 for buffer in shard.buffers):
            self._scaler = LossScale(config.initial_loss_scale, config.loss_scale_window, device)

    # what a subclass says

    def options(self, config: OptimizerConfig) -> dict[str, Any]:
        """What a param group says: lr, weight_decay and the kernel's own, at their first values."""
        raise NotImplementedError

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """The states that the update needs of a parameter, beside "main"."""
        raise NotImplementedError

    def states_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """All states of a parameter, beside "main": the update's, and "ema" where weights are averaged."""
        return self.kinds_of(name, layout) + self.average_kinds(self.config)

    def fused(self, name: str, layout: Layout) -> bool:
        """Whether `kernel` updates this parameter (else the subclass does, in `update_rest`)."""
        return True

    def update_rest(self, factor: Factor) -> None:
        """Update the parameters that are not `fused`, main weights only."""

    def _key_of(self, name: str, layout: Layout) -> UpdateKey | None:
        if not self.fused(name, layout) or name in self._reached.left_out:
            return None
        group = self._groups.number_of[name]
        decays = group in self._groups.decay_everything or self._decays(name, layout)
        return UpdateKey(group, decays, self._reached.behind.get(name, 0))

    # counts and rates

    @property
    def learning_rate(self) -> float:
        """The rate of the next step, of the first param group."""
        self._groups.follow(self.rate_step)
        return float(self.param_groups[0]["lr"])

    @property
    def rate_step(self) -> int:
        """What the rate follows: `step_count`; of float16 under DeepSpeed's schedules without the skipped ones."""
        if self._scaler is not None and self._groups.leaves_out_skipped:
            return self.step_count - self.skipped_steps
        return self.step_count

    @property
    def skipped_steps(self) -> int:
        """How many of `step_count` were skipped (waits for the device)."""
        return self._skips.count

    @property
    def loss_scale(self) -> float | Tensor:
        """What the next loss is to be multiplied by: of float16 weights a float64 tensor of shape [], else 1.

        Nothing scales a loss for you: until somebody has read this, `step` takes gradients as they are.
        """
        if self._scaler is None:
            return 1.0
        return self._scaler.read()

    # the step

    @torch.no_grad()
    def step(
        self,
        num_tokens: float | Tensor | Callable[[], Any] | None = None,
        loss_scale: float | Tensor | None = None,
        *,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Update every parameter; a `StepStats`. Collectives: `shard.finish()` if nobody called it, the norm's
        all-gather of a few numbers over the world, `shard.publish()`. No wait for an accelerator, but for offloaded
        states, Muon, parameters without a gradient, float16 under a schedule of DeepSpeed's.

        The summed gradients are divided by `num_tokens * loss_scale` and clipped to `clip_grad`.
        num_tokens: global, as in `StepResult`: the gradient is that of the mean over all valid tokens. None: an
            executor's sums as they are (told), else the mean over data and context replicas (DDP). Both agree when
            `loss_scale * loss` was a mean over tokens and every replica had equally many.
        loss_scale: what the loss was multiplied by; by default `self.loss_scale`, if somebody has read it.
        closure (also as the first argument, as in torch): zeroes, computes and returns the loss, which is returned.
        A norm that is not finite (also: 0 tokens), or a spike (`skip_grad_norm_above`), leaves parameters and states
        as they were on every rank.
        After the call gradients hold no defined value until `zero_grad`.
        Raises ValueError: a second step on the same gradients. RuntimeError: see `max_skipped_steps`.
        """
        if callable(num_tokens):
            closure, num_tokens = num_tokens, None
        with torch.enable_grad():
            loss = None if closure is None else closure()
        stats = self._one_step(num_tokens, loss_scale)
        if closure is None:
            return stats
        return loss

    def _one_step(
        self, num_tokens: float | Tensor | None, loss_scale: float | Tensor | None
    ) -> StepStats:
        shard = self.shard
        self._refuse_lent("a step would update it")
        if self._gradients_used and shard.finished:
            raise ValueError(
                f"step {self.step_count + 1}: the gradients were used up by step {self.step_count}; call zero_grad() "
                "after each step, then backward"
            )
        # Gradient sums, and what the program has written into weights and p.grad.
        if not shard.finished:
            shard.finish()
        shard.take_weights()
        changes_by_hand = shard.take_gradients()
        if self.step_count == 0:  # weights may have been loaded or written since this was made
            self.begin_average()

        # The divisor: tokens (or replicas) times loss scale.
        if self._scaler is not None and loss_scale is None:
            loss_scale = self._scaler.divisor()
        divisor = self._number(shard.default_divisor if num_tokens is None else num_tokens)
        replicas, all_replicas = shard.replicas, self.ps.size("dp-cp")
        if (
            num_tokens is not None and replicas != all_replicas
        ):  # somebody's read of p.grad has averaged them already
            divisor = divisor * (replicas / all_replicas)
        if loss_scale is not None:
            divisor = divisor * self._number(loss_scale)

        # The norm. Who lacks a gradient, and what ranks must agree on, travel with it: one collective for all.
        missing = shard.missing
        bits, options = self._reached.message(missing), self._groups.fingerprint()
        message = shard.agreement.message(bits, options, changes_by_hand, step=self.step_count + 1)
        squared, rows = self._watch.squared_norm(message)
        norm = squared.sqrt() / divisor.abs()
        found_inf = ~torch.isfinite(norm)
        self._watch.remember(found_inf)
        shard.agreement.compare(rows, self.step_count)
        is_spike, median_norm = self._spikes.look(norm)
        skipped = found_inf | is_spike
        if self._reached.update(rows, missing, skipped):
            for state_buffer in self._state_buffers:
                state_buffer.recut(self._key_of)
            self._batches = None

        # Gradient clipping: a larger divisor.
        if self.config.clip_grad > 0:
            divisor = divisor / (self.config.clip_grad / (norm + CLIP_EPS)).clamp(max=1.0)
        self._update(divisor, skipped)
        self._update_average(skipped)
        self._gradients_used = True
        shard.stepped()
        shard.publish()
        stats = StepStats(norm, found_inf, skipped, median_norm)
        self._count_step(stats, scaled=loss_scale is not None)
        return stats

    def _number(self, value: float | Tensor) -> Tensor:
        """float64, shape [], on the device; numbers are filled in there, a copy from the host would wait."""
        if isinstance(value, Tensor):
            return value.detach().to(self.ps.device, torch.float64).reshape(())
        return torch.full((), value, dtype=torch.float64, device=self.ps.device)

    def _update(self, divisor: Tensor, skipped: Tensor) -> None:
        self._groups.check()
        self._groups.follow(self.rate_step)
        self._step += 1 - skipped.float()
        factor = Factor(divisor, skipped.float(), self._step)
        for state_buffer in self._state_buffers:
            state_buffer.take_weights()
        if self._batches is None:
            self._batches = self._joined_batches()
        for key, batch in self._batches.items():
            self._apply(batch, factor, key)
        self.update_rest(factor)
        self._to_weights()
        self._streamer.run(
            [buffer for buffer in self._state_buffers if not buffer.direct], self._dtype, factor
        )

    def _joined_batches(self) -> dict[UpdateKey, Batch]:
        """One batch per key of all that is updated where it lies."""
        batches: dict[UpdateKey, list[Batch]] = {}
        for state_buffer in self._state_buffers:
            if state_buffer.direct:
                for key, batch in state_buffer.batches().items():
                    batches.setdefault(key, []).append(batch)
        return {key: Batch.joined(same_key) for key, same_key in batches.items()}

    def _apply(self, batch: Batch, factor: Factor, key: UpdateKey) -> None:
        options = self.param_groups[key.group]
        if key.behind:
            factor = replace(factor, step=factor.step - key.behind)
        self.kernel(batch, factor, options, options["weight_decay"] if key.decays else 0.0)

    def _round_stochastically(self, mains: Tensor, state_buffer: StateBuffer, span: Span) -> Tensor:
        """Stochastic rounding of elements `span`; what belongs to no parameter (padding) is rounded to nearest."""
        rounded = mains.to(torch.bfloat16)
        for shard in state_buffer.parameter_shards:
            first, last = max(shard.span[0], span[0]), min(shard.span[1], span[1])
            if first < last:
                elements = slice(first - span[0], last - span[0])
                start = shard.interval[0] + first - shard.span[0]
                rounded[elements] = self._rounding.round(
                    mains[elements], shard.name, shard.layout, start, self.step_count
                )
        return rounded

    def _to_weights(self, *, all_buffers: bool = False) -> None:
        """16-bit weights from float32 main weights, rounded to nearest; offloaded buffers do it chunk by chunk."""
        pairs = [
            (b.weights, b.main)
            for b in self._state_buffers
            if b.main is not None and (b.direct or all_buffers)
        ]
        if pairs:  # one call: on an accelerator one pass over all buckets
            torch._foreach_copy_([weights for weights, _ in pairs], [main for _, main in pairs])

    def _count_step(self, stats: StepStats, *, scaled: bool) -> None:
        self.step_count += 1
        self._groups.follow(self.rate_step)
        if self._scaler is not None and scaled:
            self._scaler.update(stats.found_inf)

        def reason() -> str:
            return stats.spike_in_words() or self._watch.reason_of_skip()

        self._skips.add(stats.skipped, self.step_count, reason)

    def non_finite(self) -> list[str]:
        """ "name on rank r" of every gradient that was not finite when a step was last skipped, r holding its sum.

        Collective: all-gather of objects over the world; the same list on every rank. Waits for the device.
        """
        return self._watch.non_finite()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; see `DataParallel.zero_grad`."""
        self.shard.zero_grad(set_to_none)
        self._gradients_used = False

    # states and checkpoints

    @torch.no_grad()
    def reload_parameters(self) -> None:
        """Take the main weights, and their average, from the weights again, after these were changed by hand."""
        for state_buffer in self._state_buffers:
            if state_buffer.main is not None:
                state_buffer.main.copy_(state_buffer.weights)
        self.begin_average()

    def states(self, *, own_mains: bool = True) -> dict[str, dict[str, OptimizerShard]]:
        """name -> kind ("main" and the update's) -> this rank's shard; live views, at stage 0 of full local tensors,
        else of intervals. A parameter that an offload's fraction cuts is a joined copy in host memory.

        own_mains: "main" also of weights that are their own main weights.
        With `step_count`, `skipped_steps` and the loss scale this is everything that a step depends on.
        """
        self._refuse_lent("its states would be those of other weights")
        full_shapes = self.shard.zero_stage == 0
        return optimizer_shards(
            self._state_buffers, self.ps, full_shapes=full_shapes, own_mains=own_mains
        )

    def memory(self) -> tuple[int, int]:
        """Bytes of the states and main weights: on the weights' device, and offloaded."""
        return state_bytes(self._state_buffers)

    def sharded_state_dict(self) -> dict[str, Any]:
        """All states and counts, for `dist_checkpointing.save` and `load`; live memory.

        Weights that are their own main weights are saved with the model only. After a load call
        `load_state_dict(state)`.
        """
        self._refuse_lent("a checkpoint would hold it as the weights")
        counts = self._counts(self._reached.of_all_stages())
        return checkpoint_states(self._state_buffers, self.shard, counts)

    def _counts(self, behind: Mapping[str, int] | None = None) -> dict[str, Any]:
        steps: Any = self.step_count
        behind = self._reached.behind if behind is None else behind
        groups, norms = self._groups.changed(), self._spikes.state()
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
        if "local" in state or "step_count" not in state:
            self.load_local(state)
            return
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
        load_states(
            self._state_buffers, self.ps, states, full_shapes=full_shapes, own_mains=weights
        )
        self._resume(step_count, skipped_steps)
        if weights:
            self._to_weights(all_buffers=True)
        self.shard.publish()

    def _resume(self, step_count: Any, skipped_steps: int) -> None:
        counts = step_count if isinstance(step_count, Mapping) else {"steps": step_count}
        self.step_count = int(counts["steps"])
        self._reached.load(counts.get("behind", {}))
        for state_buffer in self._state_buffers:
            state_buffer.recut(self._key_of)
        self._batches = None
        self._skips.begin_at(skipped_steps)
        self._spikes.load(counts.get("norms", ()))
        if counts.get("groups"):
            self._groups.load(counts["groups"], step=self.rate_step)
        else:
            self._groups.follow(self.rate_step)
        self._step.fill_(self.step_count - skipped_steps)
