"""The plain twin of `core.optimizer.ShardedAdamW`: torch's AdamW over the parameters of one rank, without buckets."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from core.dist_checkpointing.state.mapping import ShardedObject, sharded_states
from core.optimizer.config import OptimizerConfig
from core.optimizer.state.sharded_states import OptimizerShard
from core.optimizer.step.step_stats import CLIP_EPS, StepStats
from core.parallel_state.layout import layout_of, true_part
from core.parallel_state.modules import Modules, named_parameters, named_stacks
from core.parallel_state.state import ParallelState
from tests.twins.grad_norm import squared_grad_norm

KINDS = ("main", "exp_avg", "exp_avg_sq")


class Gradients(Protocol):
    """Whoever allocated `main_grad`: a gradient synchroniser."""

    def zero_grad(self) -> None:
        """Zero every `main_grad` in place."""
        ...


class AdamW:
    """torch.optim.AdamW (fused) on `main_grad`, with a float32 copy ("main") of every 16-bit parameter.

    module: one, or a pipeline's stages on this rank. The gradients are those of `grad_sync`, made before this,
    already summed over all replicas. Biases and parameters of at most one dim do not decay. A parameter that
    got no gradient is stepped with zeros, as in Megatron; torch would leave it out.

    step_count: calls of `step`, skipped ones included; the schedule reads it. loss_scale: 1, nothing is scaled.
    Raises ValueError: a trainable parameter without `main_grad`.
    """

    loss_scale = 1.0

    def __init__(self, module: Modules, ps: ParallelState, config: OptimizerConfig, *, grad_sync: Gradients) -> None:
        self.ps, self.config, self.grad_sync = ps, config, grad_sync
        self.step_count = 0
        self._schedule = config.learning_rate
        self._stacks = named_stacks(module)
        self._parameters = {name: p for name, p in named_parameters(module) if p.requires_grad}
        if lacking := [name for name, p in self._parameters.items() if getattr(p, "main_grad", None) is None]:
            raise ValueError(
                f"AdamW: {len(lacking)} of {len(self._parameters)} trainable parameters have no main_grad, first "
                f"{lacking[0]}; make the GradSync of this module first"
            )
        self._main = {name: _main(p) for name, p in self._parameters.items()}
        self._inner = self._build()
        self._skipped = torch.zeros((), dtype=torch.int64, device=ps.device)

    def _build(self) -> torch.optim.AdamW:
        config = self.config
        decayed: list[Tensor] = []
        rest: list[Tensor] = []
        for name, p in self._parameters.items():
            vector = name.rpartition(".")[2] == "bias" or len(layout_of(p).shape) <= 1
            flat = vector and config.weight_decay_of != "all"
            (rest if flat else decayed).append(self._main[name])
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        inner = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,  # on CPU too; foreach is several times slower there
        )
        for main in self._main.values():  # as torch would at its first step; a checkpoint may come before
            inner.state[main] = {
                "step": torch.zeros((), dtype=torch.float32, device=main.device),
                "exp_avg": torch.zeros_like(main, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(main, requires_grad=False),
            }
        return inner

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return self._schedule.at(self.step_count)

    @property
    def skipped_steps(self) -> int:
        """How many of `step_count` were skipped (waits for the device)."""
        return int(self._skipped.item())

    @torch.no_grad()
    def step(self, num_tokens: float | Tensor | None = None, loss_scale: float = 1.0) -> StepStats:
        """Update every parameter; one all-reduce over the world (the norm), no wait for an accelerator.

        The summed gradients are divided by `num_tokens * loss_scale` and clipped to `clip_grad`.
        num_tokens: global, as in `StepResult`: the gradient is that of the mean over all valid tokens.
            None: divided by the number of data and context replicas instead, the mean of the replicas'
            losses, as DDP has it. Both agree when `loss_scale * loss` was a mean over tokens and every
            replica had equally many; with masks or uneven batches only `num_tokens` weighs tokens equally.
        A norm that is not finite (also: 0 tokens) leaves parameters and states as they were on every rank.
        After the call `main_grad` holds no defined value until `zero_grad`.
        """
        divisor = self._number(self.ps.size("dp-cp") if num_tokens is None else num_tokens) * loss_scale
        norm = squared_grad_norm(self._parameters.values(), self.ps).sqrt() / divisor.abs()
        found_inf = ~torch.isfinite(norm)
        if self.config.clip_grad > 0:
            divisor = divisor / (self.config.clip_grad / (norm + CLIP_EPS)).clamp(max=1.0)
        self._step_inner(divisor, found_inf)
        self._to_parameters()
        self._skipped += found_inf
        self.step_count += 1
        return StepStats(norm, found_inf, found_inf)

    def _number(self, value: float | Tensor) -> Tensor:
        """A float64 tensor of shape [] on the device; numbers are filled in there, not copied."""
        if isinstance(value, Tensor):
            return value.detach().to(self.ps.device, torch.float64).reshape(())
        return torch.full((), value, dtype=torch.float64, device=self.ps.device)

    def _step_inner(self, divisor: Tensor, found_inf: Tensor) -> None:
        inner, mains = self._inner, list(self._main.values())
        rate = self.learning_rate
        for group in inner.param_groups:
            group["lr"] = rate
        gradients = [p.main_grad.to(m.dtype) for p, m in zip(self._parameters.values(), mains, strict=True)]  # type: ignore[attr-defined]
        if any(m.dtype == torch.float64 for m in mains):  # the kernel's own factor is float32
            torch._foreach_mul_(gradients, divisor.reciprocal())
            divisor = torch.ones_like(divisor)
        inner.grad_scale, inner.found_inf = divisor.float(), found_inf.float()  # type: ignore[attr-defined]
        try:
            for main, gradient in zip(mains, gradients, strict=True):
                main.grad = gradient  # assigned, not accumulated: no hook fires
            inner.step()
        finally:
            for main in mains:
                main.grad = None

    def _to_parameters(self) -> None:
        copies = [(p, m) for name, p in self._parameters.items() if (m := self._main[name]) is not p]
        if copies:
            torch._foreach_copy_([p for p, _ in copies], [m for _, m in copies])

    def zero_grad(self) -> None:
        """Zero every `main_grad` in place."""
        self.grad_sync.zero_grad()

    def non_finite(self) -> list[str]:
        """Nothing: only `ShardedOptimizer` remembers what made it skip a step."""
        return []

    @torch.no_grad()
    def reload_parameters(self) -> None:
        """Take the mains from the parameters again, after these were changed by hand (16-bit ones only)."""
        for name, parameter in self._parameters.items():
            if self._main[name] is not parameter:
                self._main[name].copy_(parameter)

    def states(self) -> dict[str, dict[str, OptimizerShard]]:
        """name -> {"main", "exp_avg", "exp_avg_sq"}: this rank's part of each, as live views.

        With `step_count` and `skipped_steps` this is everything that a step depends on.
        """
        at, sizes = self.ps.coordinate, self.ps.sizes
        found = {}
        for name, parameter in self._parameters.items():
            layout = layout_of(parameter)
            box = layout.box(at, sizes)
            found[name] = {
                kind: OptimizerShard(true_part(tensor, layout, at, sizes), layout, box)
                for kind, tensor in self._tensors(name).items()
            }
        return found

    def _tensors(self, name: str) -> dict[str, Tensor]:
        main = self._main[name]
        state = self._inner.state[main]
        return {"main": main.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    def sharded_state_dict(self) -> dict[str, Any]:
        """`states()` and the counts, for `dist_checkpointing.save` and `load`; live memory.

        A parameter that is its own main is saved as a weight only. After a load call `load_state_dict(state)`.
        """
        states = {
            name: {kind: part for kind, part in kinds.items() if kind != "main" or self._main[name] is not parameter}
            for (name, kinds), parameter in zip(self.states().items(), self._parameters.values(), strict=True)
        }
        return {
            "step_count": ShardedObject("optimizer/step_count", self.step_count),
            "skipped_steps": ShardedObject("optimizer/skipped_steps", self.skipped_steps),
            "states": sharded_states(states, self.ps, stacks=self._stacks),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After a checkpoint filled the memory that `sharded_state_dict` named: take the counts from `state`.

        Parameters stay as they are: a model is loaded by itself, and a weight need not be its main copy rounded.
        """
        count = state["step_count"]
        if isinstance(count, Mapping):
            raise ValueError(
                f"{len(count['behind'])} parameters of this checkpoint missed updates, or its groups were changed by "
                "hand: this AdamW counts one number for all; load it with ShardedAdamW"
            )
        self._resume(count, state["skipped_steps"])

    @torch.no_grad()
    def load_states(
        self, states: Mapping[str, Mapping[str, Tensor | OptimizerShard]], step_count: int, *, skipped_steps: int = 0
    ) -> None:
        """Restore what `states` gave (true local parts), bit for bit; 16-bit parameters are copied from "main".

        Raises ValueError, before anything is written: names, kinds or shapes that are not this rank's.
        """
        mine = self.states()
        if names := sorted(mine.keys() ^ states.keys()):
            raise ValueError(
                f"load_states: {len(states)} parameters given for {len(mine)}; not on both sides: "
                f"{', '.join(names[:5])}; build the same model, and trainable parameters only"
            )
        given = {(name, kind): _tensor(states[name], name, kind) for name in mine for kind in KINDS}
        for (name, kind), tensor in given.items():
            if tensor.shape != (shape := mine[name][kind].tensor.shape):
                raise ValueError(
                    f"load_states: {kind} of {name} is {tuple(tensor.shape)}, this rank holds {tuple(shape)}; give "
                    f"the part {mine[name][kind].box} of the whole"
                )
        for (name, kind), tensor in given.items():
            mine[name][kind].tensor.copy_(tensor)
        self._resume(step_count, skipped_steps)
        self._to_parameters()

    def _resume(self, step_count: int, skipped_steps: int) -> None:
        self.step_count = step_count
        self._skipped.fill_(skipped_steps)
        for state in self._inner.state.values():
            state["step"].fill_(step_count - skipped_steps)


def _main(parameter: Parameter) -> Tensor:
    """The tensor that is updated: the parameter, or a float32 copy of a 16-bit one."""
    return parameter.detach().float() if parameter.dtype.itemsize < 4 else parameter


def _tensor(kinds: Mapping[str, Tensor | OptimizerShard], name: str, kind: str) -> Tensor:
    if kind not in kinds:
        raise ValueError(f"load_states: {name} has {sorted(kinds)} but not {kind}; all of {KINDS} are needed")
    found = kinds[kind]
    return found.tensor if isinstance(found, OptimizerShard) else found
