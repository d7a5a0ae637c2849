"""LAMB on flat buffers: norms of whole parameters, however they are cut."""

from typing import Any

import torch
from torch import Tensor

from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import adamw_options
from core.optimizer.state.flat_shard import ParameterShard
from core.optimizer.state.kernels import Factor
from core.optimizer.state.state_buffers import StateBuffer
from core.optimizer.whole.by_parameter import UpdatesByParameter
from core.parallel_state.layout import Layout


class ShardedLamb(UpdatesByParameter):
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's step r with decay, times the parameter's norm over that of r.

    phi is the identity. A norm is of a whole parameter, a stack of experts being one. What is not among those that
    decay (biases, norms) has no ratio and takes Adam's step, and so does a parameter of zeros.
    Each step all-reduces two numbers per parameter, over the ranks that hold its parts. States: exp_avg, exp_avg_sq.
    Raises ValueError: main_params=False.
    """

    def options(self, config: OptimizerConfig) -> dict[str, Any]:
        """Those of AdamW, whose moments it shares: betas and epsilon in each group."""
        return adamw_options(config)

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """Adam's two moments, exp_avg and exp_avg_sq."""
        return "exp_avg", "exp_avg_sq"

    def update_rest(self, factor: Factor) -> None:
        """Both moments, then norms, then weights: nothing waits for an accelerator. All-reduces, see the class."""
        active = 1.0 - factor.found_inf.double()
        for state_buffer, parameter_shard in self._parts:
            if parameter_shard.name not in self._reached.left_out:
                self._update_moments(state_buffer, parameter_shard, factor, active)
        ratios = self._ratios(factor)
        for state_buffer, parameter_shard in self._parts:
            if parameter_shard.name in self._reached.left_out:
                continue
            rate = self.options_of(parameter_shard.name)["lr"] * active
            if self.decays_at_all(parameter_shard):
                rate = rate * ratios[self._place[parameter_shard.name]]
            self.weights_of(state_buffer, parameter_shard).sub_(
                self._adam_step(state_buffer, parameter_shard, factor).mul_(rate)
            )

    def _update_moments(
        self,
        state_buffer: StateBuffer,
        parameter_shard: ParameterShard,
        factor: Factor,
        active: Tensor,
    ) -> None:
        own = slice(*parameter_shard.span)
        beta1, beta2 = self.options_of(parameter_shard.name)["betas"]
        first, second = (state_buffer.states[kind][own] for kind in ("exp_avg", "exp_avg_sq"))
        gradient = self.gradient_of(state_buffer, parameter_shard, factor)
        first.lerp_(gradient, ((1 - beta1) * active).to(first.dtype))
        second.lerp_(gradient.square_(), ((1 - beta2) * active).to(first.dtype))

    def _adam_step(
        self, state_buffer: StateBuffer, parameter_shard: ParameterShard, factor: Factor
    ) -> Tensor:
        """r of this rank's part: Adam's corrected moments, and the decay."""
        own = slice(*parameter_shard.span)
        options = self.options_of(parameter_shard.name)
        beta1, beta2 = options["betas"]
        step = self.updates_of(parameter_shard.name, factor)
        second = state_buffer.states["exp_avg_sq"][own] / (1 - beta2**step)
        first = state_buffer.states["exp_avg"][own] / (1 - beta1**step)
        update = first.div_(second.sqrt_().add_(options["eps"]))
        if not self.decays_at_all(parameter_shard):
            return update
        return update.add_(
            self.weights_of(state_buffer, parameter_shard), alpha=options["weight_decay"]
        )

    def _ratios(self, factor: Factor) -> Tensor:
        """[parameters] float64: norms of whole parameters over those of their steps; 1 where one of both is 0."""
        squares = torch.zeros(len(self._place), 2, dtype=torch.float64, device=self.ps.device)
        for state_buffer, parameter_shard in self._parts:
            weights, step = (
                self.weights_of(state_buffer, parameter_shard),
                self._adam_step(state_buffer, parameter_shard, factor),
            )
            pair = torch.stack(
                [torch.linalg.vector_norm(t, dtype=torch.float64) for t in (weights, step)]
            )
            squares[self._place[parameter_shard.name]] += pair.square()
        self.sum_by_parameter(squares)
        weights, steps = squares.sqrt().unbind(1)
        return torch.where((weights > 0) & (steps > 0), weights / steps, 1.0)
