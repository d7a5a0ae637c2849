"""One optimizer step over flat buffers: each rank updates its shard, with one fused call per group of options.

This is mixed-precision training with float32 main (master) weights and ZeRO's divided optimizer states
(arXiv 1910.02054): unscaling, averaging and gradient clipping are one factor inside the fused update.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.data_parallel import Buffer, DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import GroupOptions, Groups
from core.optimizer.saved import SavedStates
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
from core.optimizer.state.state_buffers import (
    StateBuffer,
    allocate_states,
    make_state_buffers,
)
from core.optimizer.state.streamed import Streamer
from core.optimizer.step.loss_scale import LossScale
from core.optimizer.step.reached import Reached
from core.optimizer.step.skips import Skips
from core.optimizer.step.spikes import Spikes
from core.optimizer.step.step_stats import CLIP_EPS, StepStats
from core.optimizer.step.watch import GradientWatch
from core.parallel_state.layout import Layout, layout_of


class ShardedOptimizer(SavedStates):
    """An update (`kernel`) over the flat buffers of a `DataParallel`, at any ZeRO stage and in one process, too.

    A torch.optim.Optimizer: param_groups, schedulers, closures, hooks and `zero_grad` mean what they do there.
    Subclasses say which update with which options and states. Weights of 16 bits have float32 main weights, others
    are their own; weights that somebody else writes (`load_state_dict`, by hand) are adopted. A parameter without a
    gradient on any rank is left out of the update, as in torch. At every ZeRO stage and however buckets are cut,
    float32 parameters get the same bits: the norm is summed per rank in float64 in rank order, and cuts lie at
    multiples of 64 elements.

    shard: a `DataParallel`. decays(name, layout): which parameters decay; by default all of two or more dims that are
        not biases. offload: which states live in host memory or on disk. groups: see `Groups`; parameters of none
        have the configuration's options, in a last group.
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
        groups: GroupOptions | None = None,
    ) -> None:
        if not isinstance(config, OptimizerConfig):
            raise ValueError(
                f"{type(self).__name__} takes an OptimizerConfig, not a {type(config).__name__}; write "
                f"{type(self).__name__}(shard, OptimizerConfig(lr=1e-3)), or OptimizerConfig(**options)"
            )
        self.shard = shard
        self.ps = shard.ps
        self.config = config
        self.step_count = 0
        self._gradients_used = False
        device = self.ps.device

        # Options: param groups, and who decays.
        if decays is None and config.weight_decay_of == "all":
            decays = everything_decays
        self._groups = Groups(
            shard, config, self.options(config), groups or (), spares=decays is None
        )
        self._face(self._groups.all, self.options(config))
        self._decays = decays if decays is not None else default_decays

        # States: main weights and moments of the elements that this rank updates.
        self._dtype = main_dtype(shard, config)
        self._reached = Reached(shard, self.ps)
        self._state_buffers = make_state_buffers(
            shard, kinds_of=self.states_of, key_of=self._key_of, offload=offload
        )
        allocate_states(
            self._state_buffers,
            self._dtype,
            offload,
            self.ps.rank,
            main_params=config.main_params,
            quantizes=self.quantizes,
        )
        self._batches: dict[UpdateKey, Batch] | None = None
        self._begin_average(self._state_buffers, config.ema_decay)
        self._opened: list[StateBuffer] | None = None

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

    def quantizes(self, name: str, layout: Layout) -> bool:
        """Whether the parameter's moments have 8 bits."""
        return False

    def moments_of(self, buffer: Buffer) -> float:
        """States of an element that this rank updates of a bucket, each as large as a main weight."""
        # a bucket has memory for every kind of state that one of its parameters needs
        kinds: set[str] = set()
        for segment in buffer.segments:
            kinds |= set(self.states_of(segment.name, layout_of(segment.parameter)))
        return len(kinds)

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
        """The rate of the next step, of the parameters that no given group takes; or of group 0."""
        self._groups.follow(self.rate_step)
        return float(self.param_groups[self._groups.rest or 0]["lr"])

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
            closure = num_tokens
            num_tokens = None
        with torch.enable_grad():
            loss = None if closure is None else closure()
        stats = self._one_step(num_tokens, loss_scale)
        if closure is None:
            return stats
        return loss

    def _check_step(self) -> None:
        """Raises ValueError: there is nothing to step, or not any more."""
        if self.shard.is_removed:
            raise ValueError(
                "the DataParallel that this optimizer updates was removed: make a new optimizer for the one that the "
                "model is in now. Its states go along by sharded_state_dict(), dist_checkpointing.save and load"
            )
        self._refuse_lent("a step would update it")
        if self._gradients_used and self.shard.used:
            raise ValueError(
                f"step {self.step_count + 1}: the gradients were used up by step {self.step_count}; call zero_grad() "
                "after each step, then backward"
            )

    def _one_step(
        self, num_tokens: float | Tensor | None, loss_scale: float | Tensor | None
    ) -> StepStats:
        shard = self.shard
        self._check_step()
        # Gradient sums, and what the program has written into weights and p.grad.
        if not shard.finished:
            shard.finish()
        shard.take_weights()
        changes_by_hand = shard.take_gradients()
        # weights may have been loaded or written since this was made
        if self.step_count == 0:
            self.begin_average()

        # The divisor: tokens (or replicas) times loss scale.
        if self._scaler is not None and loss_scale is None:
            loss_scale = self._scaler.divisor()
        divisor = self._number(shard.default_divisor if num_tokens is None else num_tokens)
        replicas = shard.replicas
        all_replicas = self.ps.size("dp-cp")
        # somebody's read of p.grad has averaged them already
        if num_tokens is not None and replicas != all_replicas:
            divisor = divisor * (replicas / all_replicas)
        if loss_scale is not None:
            divisor = divisor * self._number(loss_scale)

        # The norm. Who lacks a gradient, and what ranks must agree on, travel with it: one collective for all.
        missing = shard.missing
        bits = self._reached.message(missing)
        options = self._groups.fingerprint()
        message = shard.agreement.message(bits, options, changes_by_hand, step=self.step_count + 1)
        squared, rows = self._watch.squared_norm(message)
        norm = squared.sqrt() / divisor.abs()
        # one bad gradient on any rank makes the norm, which all ranks share, bad: all skip alike
        found_inf = ~torch.isfinite(norm)
        self._watch.remember(found_inf)
        shard.agreement.compare(rows, self.step_count)
        is_spike, median_norm = self._spikes.look(norm)
        skipped = found_inf | is_spike
        if self._reached.update(rows, missing, skipped):
            self._recut()

        # Gradient clipping: a larger divisor.
        if self.config.clip_grad > 0:
            divisor = divisor / (self.config.clip_grad / (norm + CLIP_EPS)).clamp(max=1.0)
        # the kernel itself leaves everything as it was in a step that is skipped
        self._opened = None
        self._update(divisor, skipped)
        self._update_average(skipped)
        self._gradients_used = True
        shard.stepped()
        shard.publish()
        stats = StepStats(norm, found_inf, skipped, median_norm)
        self._count_step(stats, scaled=loss_scale is not None)
        return stats

    def _recut(self) -> None:
        """Parameters have changed the way in which they are updated: other runs of elements, other batches."""
        for state_buffer in self._state_buffers:
            state_buffer.recut(self._key_of)
        self._batches = None

    def _number(self, value: float | Tensor) -> Tensor:
        """float64, shape [], on the device; numbers are filled in there, a copy from the host would wait."""
        if isinstance(value, Tensor):
            return value.detach().to(self.ps.device, torch.float64).reshape(())
        return torch.full((), value, dtype=torch.float64, device=self.ps.device)

    def _update(self, divisor: Tensor, skipped: Tensor) -> None:
        self._groups.check()
        self._groups.follow(self.rate_step)
        # on the device: whether this step counts is not known on the host
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
        # Adam's bias correction counts a parameter's own updates
        if key.behind:
            factor = replace(factor, step=factor.step - key.behind)
        self.kernel(batch, factor, options, options["weight_decay"] if key.decays else 0.0)

    def _round_stochastically(self, mains: Tensor, state_buffer: StateBuffer, span: Span) -> Tensor:
        """Stochastic rounding of elements `span`; what belongs to no parameter (padding) is rounded to nearest."""
        rounded = mains.to(torch.bfloat16)
        for shard in state_buffer.parameter_shards:
            first = max(shard.span[0], span[0])
            last = min(shard.span[1], span[1])
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
        # one call: on an accelerator one pass over all buckets
        if pairs:
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
