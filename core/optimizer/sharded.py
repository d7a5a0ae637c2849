"""One optimizer step over flat buffers: each rank updates what it holds, with one fused call per decay group."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import Given, Groups, adamw_options
from core.optimizer.state.flat_shard import Decays, Key, Span, default_decays, everything_decays
from core.optimizer.state.kernels import Batch, Factor, Kernel, adamw
from core.optimizer.state.offload import Offload
from core.optimizer.state.parts import StateBuffer, allocate, make_parts
from core.optimizer.state.rounding import Rounding
from core.optimizer.state.sharded_states import OptimizerShard, States, load_states, sharded_parts, state_parts
from core.optimizer.state.streamed import Streamer
from core.optimizer.step.loss_scale import LossScale
from core.optimizer.step.reached import Reached
from core.optimizer.step.step_stats import CLIP_EPS, StepStats
from core.optimizer.step.watch import GradientWatch, OptionsWatch
from core.optimizer.torch_face import TorchFace
from core.parallel_state.layout import Layout

NONE_GOOD = 100  # that many first steps that are all skipped are an error, whatever max_skipped_steps says


class ShardedOptimizer(TorchFace):
    """What `AdamW` is to parameters, for the flat buffers of a `DataParallel`: same step, same states, same files.

    A torch.optim.Optimizer: param_groups, schedulers, closures, hooks and `zero_grad` mean what they do there.
    Subclasses say which update (`kernel`) with which options and states. Weights of 16 bits have a float32 copy
    ("main"), others are their own; weights that somebody else writes (`load_state_dict`, by hand) are taken as they
    are. A parameter without a gradient on any rank is left out of the update, as in torch. At every ZeRO stage and
    however buckets are cut, float32 parameters get the same bits: the norm is summed per part in float64 in rank
    order, and cuts lie at multiples of 64 elements.

    shard: a `DataParallel`. decays(name, layout): which parameters decay; by default all of two or more dims that are
        not biases. offload: which states live in host memory or on disk. groups: see `Groups`; parameters of none
        have the configuration's options.
    step_count: calls of `step`, skipped ones included; the configuration's schedule reads it.

    Collective when it is made. Raises ValueError: main parameters of float32 and float64 in one optimizer;
    main_params=False with float16; complex parameters.
    """

    def __init__(
        self,
        shard: DataParallel,
        config: OptimizerConfig,
        *,
        decays: Decays | None = None,
        offload: Offload | None = None,
        groups: Given = (),
    ) -> None:
        self.shard, self.ps, self.config = shard, shard.ps, config
        self.step_count = self._since = 0
        self._used = False
        if decays is None and config.weight_decay_of == "all":
            decays = everything_decays
        self._groups = Groups(shard, config, self.options(config), groups, spares=decays is None)
        self._face(self._groups.all, self.options(config))
        self._decays = decays if decays is not None else default_decays
        self._dtype = _main_dtype(shard, config)
        self._reached = Reached(shard, self.ps)
        self._parts = make_parts(shard, kinds_of=self.kinds_of, key_of=self._key_of, offload=offload)
        allocate(self._parts, self._dtype, offload, self.ps.rank, main_params=config.main_params)
        self._batches: dict[Key, Batch] | None = None
        self._step = torch.zeros((), device=self.ps.device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=self.ps.device)
        self._in_row = torch.zeros_like(self._skipped)
        self._watch, self._options = GradientWatch(shard.buffers, self.ps), OptionsWatch(self.ps)
        self._rounding = Rounding(config.rounding_seed, self.ps.coordinate, self.ps.sizes)
        self._streamer = Streamer(self.ps.device, self._apply, self._round)
        half = any(buffer.weights.dtype == torch.float16 for buffer in shard.buffers)
        window, initial = config.loss_scale_window, config.initial_loss_scale
        self._scaler = LossScale(initial, window, self.ps.device) if half else None

    def options(self, config: OptimizerConfig) -> dict[str, Any]:
        """What a param group says: lr, weight_decay and the kernel's own, at their first values."""
        raise NotImplementedError

    kernel: Kernel  # the fused update, a static method

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """The states of a parameter, beside "main"."""
        raise NotImplementedError

    def fused(self, name: str, layout: Layout) -> bool:
        """Whether `kernel` updates this parameter (else the subclass does, in `update_rest`)."""
        return True

    def update_rest(self, factor: Factor) -> None:
        """Update the parameters that are not `fused`, main parameters only."""

    def _key_of(self, name: str, layout: Layout) -> Key | None:
        if not self.fused(name, layout) or name in self._reached.left_out:
            return None
        group = self._groups.of[name]
        decays = group in self._groups.decays_all or self._decays(name, layout)
        return Key(group, decays, self._reached.behind.get(name, 0))

    @property
    def learning_rate(self) -> float:
        """The rate of the next step, of the first param group."""
        self._groups.follow(self.rate_step)
        return float(self.param_groups[0]["lr"])

    @property
    def rate_step(self) -> int:
        """What the rate follows: `step_count`; of float16 under DeepSpeed's schedules without the skipped ones."""
        leaves_out = self._scaler is not None and self._groups.leaves_out_skipped
        return self.step_count - (self.skipped_steps if leaves_out else 0)

    @property
    def skipped_steps(self) -> int:
        """How many of `step_count` were skipped (waits for the device)."""
        return int(self._skipped.item())

    @property
    def loss_scale(self) -> float | Tensor:
        """What the next loss is to be multiplied by: of float16 weights a float64 tensor of shape [], else 1.

        Nothing scales a loss for you: until somebody has read this, `step` takes gradients as they are.
        """
        return 1.0 if self._scaler is None else self._scaler.asked()

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

        num_tokens: as in `AdamW.step`; None takes the mean over data and context replicas, or an executor's sums.
        loss_scale: what the loss was multiplied by; by default `self.loss_scale`, if somebody has read it.
        closure (also as the first argument, as in torch): zeroes, computes and returns the loss, which is returned.
        A norm that is not finite (also: 0 tokens) leaves parameters and states as they were on every rank.
        After the call gradients hold no defined value until `zero_grad`.
        Raises ValueError: a second step on the same gradients. RuntimeError: see `max_skipped_steps`.
        """
        if callable(num_tokens):
            closure, num_tokens = num_tokens, None
        with torch.enable_grad():
            loss = None if closure is None else closure()
        stats = self._one_step(num_tokens, loss_scale)
        return stats if closure is None else loss

    def _one_step(self, num_tokens: float | Tensor | None, loss_scale: float | Tensor | None) -> StepStats:
        if self._used and self.shard.finished:
            raise ValueError(
                f"step {self.step_count + 1}: the gradients were used up by step {self.step_count}; call zero_grad() "
                "after each step, then backward"
            )
        if not self.shard.finished:
            self.shard.finish()
        self.shard.take_weights()
        self.shard.take_gradients()
        if self._scaler is not None and loss_scale is None:
            loss_scale = self._scaler.taken_out()
        replicas = self.shard.replicas
        divisor = self._number(self.shard.default_divisor if num_tokens is None else num_tokens)
        if num_tokens is not None and replicas != (whole := self.ps.size("dp-cp")):
            divisor = divisor * (replicas / whole)
        if loss_scale is not None:
            divisor = divisor * self._number(loss_scale)
        missing = self.shard.missing
        beside = self._options.message(self._reached.message(missing), self._groups.number())
        squared, rows = self._watch.squared_norm(beside)
        norm = squared.sqrt() / divisor.abs()
        found_inf = ~torch.isfinite(norm)
        self._watch.keep(found_inf)
        self._options.compare(rows, self.step_count)
        if self._reached.hear(rows, missing, found_inf):
            for part in self._parts:
                part.recut(self._key_of)
            self._batches = None
        if self.config.clip_grad > 0:
            divisor = divisor / (self.config.clip_grad / (norm + CLIP_EPS)).clamp(max=1.0)
        self._update(divisor, found_inf)
        self._used = True
        self.shard.stepped()
        self.shard.publish()
        self._count(found_inf, scaled=loss_scale is not None)
        return StepStats(norm, found_inf, found_inf)

    def _number(self, value: float | Tensor) -> Tensor:
        """float64, shape [], on the device; numbers are filled in there, not copied."""
        if isinstance(value, Tensor):
            return value.detach().to(self.ps.device, torch.float64).reshape(())
        return torch.full((), value, dtype=torch.float64, device=self.ps.device)

    def _update(self, divisor: Tensor, found_inf: Tensor) -> None:
        self._groups.check()
        self._groups.follow(self.rate_step)
        self._step += 1 - found_inf.float()
        factor = Factor(divisor, found_inf.float(), self._step)
        for part in self._parts:
            part.take_weights()
        if self._batches is None:
            self._batches = self._cut()
        for key, batch in self._batches.items():
            self._apply(batch, factor, key)
        self.update_rest(factor)
        self._to_weights()
        self._streamer.run([part for part in self._parts if not part.direct], self._dtype, factor)

    def _cut(self) -> dict[Key, Batch]:
        """One batch per key of all that is updated where it is."""
        found: dict[Key, list[Batch]] = {}
        for part in self._parts:
            for key, batch in part.batches().items() if part.direct else ():
                found.setdefault(key, []).append(batch)
        return {key: Batch.joined(batches) for key, batches in found.items()}

    def _apply(self, batch: Batch, factor: Factor, key: Key) -> None:
        options = self.param_groups[key.group]
        if key.behind:
            factor = replace(factor, step=factor.step - key.behind)
        self.kernel(batch, factor, options, options["weight_decay"] if key.decays else 0.0)

    def _round(self, mains: Tensor, part: StateBuffer, span: Span) -> Tensor:
        rounded, rounding = mains.to(torch.bfloat16), self._rounding
        for piece in part.pieces:
            first, last = max(piece.at[0], span[0]), min(piece.at[1], span[1])
            if first < last:
                inside, start = slice(first - span[0], last - span[0]), piece.interval[0] + first - piece.at[0]
                rounded[inside] = rounding.round(mains[inside], piece.name, piece.layout, start, self.step_count)
        return rounded

    def _to_weights(self, *, all_parts: bool = False) -> None:
        for part in self._parts:
            if part.main is not None and (part.direct or all_parts):
                part.weights.copy_(part.main)

    def _count(self, found_inf: Tensor, *, scaled: bool) -> None:
        self._skipped += found_inf
        self._in_row = torch.where(found_inf, self._in_row + 1, 0)
        self.step_count += 1
        self._groups.follow(self.rate_step)
        if self._scaler is not None and scaled:
            self._scaler.update(found_inf)
        self._since += 1
        most = self.config.max_skipped_steps or (NONE_GOOD if self._since == NONE_GOOD else 0)
        looks = most and (self.ps.device.type == "cpu" or self.step_count % most == 0)
        if looks and (row := int(self._in_row.item())) >= most:
            raise RuntimeError(
                f"step {self.step_count}: {row} steps in a row were skipped, "
                f"max_skipped_steps={self.config.max_skipped_steps}: {self._why()}"
                "; lower the learning rate or look at the data of these steps"
            )

    def _why(self) -> str:
        if names := self.non_finite():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return f"the gradient is not finite in {', '.join(names[:3])}{more}"
        return "every gradient is finite, but not their norm over num_tokens (0 tokens, or an overflow of the sum)"

    def non_finite(self) -> list[str]:
        """ "name on rank r" of every gradient that was not finite when a step was last skipped, r holding its sum.

        Collective: all-gather of objects over the world; the same list on every rank. Waits for the device.
        """
        return self._watch.non_finite()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; see `DataParallel.zero_grad`."""
        self.shard.zero_grad(set_to_none)
        self._used = False

    @torch.no_grad()
    def reload_parameters(self) -> None:
        """Take the mains from the parameters again, after these were changed by hand (16-bit ones only)."""
        for part in self._parts:
            if part.main is not None:
                part.main.copy_(part.weights)

    def states(self, *, own_mains: bool = True) -> dict[str, dict[str, OptimizerShard]]:
        """name -> kind ("main" and the update's) -> this rank's part; live views, at stage 0 of whole local tensors,
        else of intervals. A parameter that an offload's fraction cuts is a joined copy in host memory.

        With `step_count`, `skipped_steps` and the loss scale this is everything that a step depends on.
        """
        return state_parts(self._parts, self.ps, whole=self.shard.zero_stage == 0, own_mains=own_mains)

    def memory(self) -> tuple[int, int]:
        """Bytes of the states and main copies: on the weights' device, and offloaded."""
        sizes = [0, 0]
        for part in self._parts:
            held = [*part.states.values(), *([] if part.main is None else [part.main])]
            sizes[not part.resident] += sum(tensor.numel() * tensor.element_size() for tensor in held)
        return sizes[0], sizes[1]

    def sharded_state_dict(self) -> dict[str, Any]:
        """All states and counts, for `dist_checkpointing.save` and `load`; live memory, the keys of `AdamW`'s.

        A parameter that is its own main is saved as a weight only. After a load call `load_state_dict(state)`.
        """
        return sharded_parts(self._parts, self.shard, self._counts(self._reached.of_all_stages()))

    def _counts(self, behind: Mapping[str, int] | None = None) -> dict[str, Any]:
        count: Any = self.step_count
        behind = self._reached.behind if behind is None else behind
        if (groups := self._groups.changed()) or behind:
            count = {"steps": count, "behind": behind, "groups": groups}
        counts = {"step_count": count, "skipped_steps": self.skipped_steps}
        return counts if self._scaler is None else counts | {"loss_scale": self._scaler.state()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave on this rank at the same layout; or, after a checkpoint filled the memory that
        `sharded_state_dict` named, the counts from `state`.

        Weights stay as they are, a model is loaded by itself; but `shard.publish()` tells all ranks of them.
        Raises ValueError: another rank's part.
        """
        if "local" in state or "step_count" not in state:
            self.load_local(state)
            return
        self._resume(state["step_count"], state["skipped_steps"])
        if self._scaler is not None:
            self._scaler.load(state["loss_scale"])
        self.shard.publish()

    @torch.no_grad()
    def load_states(self, states: States, step_count: int, skipped_steps: int = 0, *, weights: bool = True) -> None:
        """Restore what `states` gave at the same layout, bit for bit; `weights`, from "main", or none of them.

        Raises ValueError, before anything is written: names, kinds or shapes that are not this rank's.
        """
        load_states(self._parts, self.ps, states, whole=self.shard.zero_stage == 0, own_mains=weights)
        self._resume(step_count, skipped_steps)
        if weights:
            self._to_weights(all_parts=True)
        self.shard.publish()

    def _resume(self, step_count: Any, skipped_steps: int) -> None:
        more = step_count if isinstance(step_count, Mapping) else {"steps": step_count}
        self.step_count = int(more["steps"])
        self._reached.load(more.get("behind", {}))
        for part in self._parts:
            part.recut(self._key_of)
        self._batches = None
        self._skipped.fill_(skipped_steps)
        if more.get("groups"):
            self._groups.load(more["groups"], step=self.rate_step)
        else:
            self._groups.follow(self.rate_step)
        self._in_row.zero_()
        self._step.fill_(self.step_count - skipped_steps)


class ShardedAdamW(ShardedOptimizer):
    """torch.optim.AdamW (fused) on flat buffers: states exp_avg and exp_avg_sq."""

    kernel = staticmethod(adamw)

    def options(self, config: OptimizerConfig) -> dict[str, Any]:
        """As torch.optim.AdamW names them."""
        return adamw_options(config)

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """Adam's two moments, exp_avg and exp_avg_sq."""
        return "exp_avg", "exp_avg_sq"


def _main_dtype(shard: DataParallel, config: OptimizerConfig) -> torch.dtype:
    """The one dtype in which everything is updated."""
    first: dict[torch.dtype, str] = {}
    for buffer in shard.buffers:
        dtype = buffer.weights.dtype
        names = [segment.name for segment in buffer.segments]
        if dtype == torch.float16 and not config.main_params:
            raise ValueError(
                f"main_params=False rounds to bfloat16, but {names[0] if names else 'a weight'} is float16; use "
                "bfloat16 weights, or main_params=True"
            )
        if names and dtype.is_complex:
            raise ValueError(
                f"{names[0]} is {str(dtype).removeprefix('torch.')}, and 0 of the fused updates know that; "
                "hold it as a real parameter of one dim more (torch.view_as_real) and view it as complex in forward"
            )
        if names:
            first.setdefault(torch.float32 if dtype.itemsize < 4 else dtype, names[0])
    if len(first) > 1:
        each = " and ".join(f"{str(d).removeprefix('torch.')} ({name})" for d, name in first.items())
        raise ValueError(
            f"one optimizer updates parameters of 1 dtype, these are of {len(first)}: {each}; build the model with "
            "one params_dtype (16-bit weights count as float32)"
        )
    return next(iter(first), torch.float32)
