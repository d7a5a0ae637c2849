"""LAMB on flat buffers: norms of whole parameters, however they are cut."""

from typing import Any

import torch
from torch import Tensor

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import GroupOptions, adamw_options
from core.optimizer.sharded import ShardedOptimizer
from core.optimizer.state.flat_shard import Decays, ParameterShard
from core.optimizer.state.kernels import Factor, adamw
from core.optimizer.state.state_buffers import StateBuffer
from core.parallel_state.collectives import Group, all_reduce
from core.parallel_state.layout import Layout, layout_of


class ShardedLamb(ShardedOptimizer):
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's step r with decay, times the parameter's norm over that of r.

    phi is the identity. A norm is of a whole parameter, a stack of experts being one. What is not among those that
    decay (biases, norms) has no ratio and takes Adam's step, and so does a parameter of zeros.
    Each step all-reduces two numbers per parameter, over the ranks that hold its parts. States: exp_avg, exp_avg_sq.
    Raises ValueError: main_params=False.
    """

    kernel = staticmethod(adamw)  # of no parameter: all are updated in `update_rest`

    def __init__(
        self,
        shard: DataParallel,
        config: OptimizerConfig,
        *,
        decays: Decays | None = None,
        groups: GroupOptions = (),
    ) -> None:
        if not config.main_params:
            raise ValueError(
                "LAMB updates main parameters, but main_params=False; use main_params=True"
            )
        super().__init__(shard, config, decays=decays, groups=groups)
        self._parts = [
            (state_buffer, parameter_shard)
            for state_buffer in self._state_buffers
            for parameter_shard in state_buffer.parameter_shards
        ]
        self._place = {name: place for place, name in enumerate(shard.named_parameters())}
        self._sums = self._who_sums()

    def options(self, config: OptimizerConfig) -> dict[str, Any]:
        """Those of AdamW, whose moments it shares: betas and epsilon in each group."""
        return adamw_options(config)

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """Adam's two moments, exp_avg and exp_avg_sq."""
        return "exp_avg", "exp_avg_sq"

    def fused(self, name: str, layout: Layout) -> bool:
        """None: a ratio is known only when all parts of a parameter are."""
        return False

    def _who_sums(self) -> list[tuple[Group, Tensor]]:
        """Groups over whose ranks parameters are cut, and which; in one order on all ranks of each group."""
        places: dict[int, tuple[Group, list[int]]] = {}
        for buffer in self.shard.buffers:
            for slot, parameter in zip(buffer.bucket.slots, buffer.parameters, strict=True):
                axes = [axis for axis in layout_of(parameter).split if self.ps.size(axis) > 1]
                groups = [buffer.ranks if buffer.stage else None, *map(self.ps.group, axes)]
                for group in filter(None, groups):
                    places.setdefault(id(group), (group, []))[1].append(self._place[slot.name])
        return [
            (group, torch.tensor(found, device=self.ps.device)) for group, found in places.values()
        ]

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
            options = self.param_groups[self._groups.number_of[parameter_shard.name]]
            rate = options["lr"] * active
            if self._is_adapted(parameter_shard):
                rate = rate * ratios[self._place[parameter_shard.name]]
            self._weights(state_buffer, parameter_shard).sub_(
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
        beta1, beta2 = self.param_groups[self._groups.number_of[parameter_shard.name]]["betas"]
        first, second = (state_buffer.states[kind][own] for kind in ("exp_avg", "exp_avg_sq"))
        # 0 for what is not finite: nothing is added then, but 0 times NaN would be NaN
        gradient = state_buffer.gradients[own].to(first.dtype) / factor.divisor
        gradient.masked_fill_(factor.found_inf.bool(), 0.0)
        first.lerp_(gradient, ((1 - beta1) * active).to(first.dtype))
        second.lerp_(gradient.square_(), ((1 - beta2) * active).to(first.dtype))

    def _adam_step(
        self, state_buffer: StateBuffer, parameter_shard: ParameterShard, factor: Factor
    ) -> Tensor:
        """r of this rank's part: Adam's corrected moments, and the decay."""
        own = slice(*parameter_shard.span)
        options = self.param_groups[self._groups.number_of[parameter_shard.name]]
        beta1, beta2 = options["betas"]
        step = (factor.step.double() - self._reached.behind.get(parameter_shard.name, 0)).clamp(
            min=1
        )
        second = state_buffer.states["exp_avg_sq"][own] / (1 - beta2**step)
        first = state_buffer.states["exp_avg"][own] / (1 - beta1**step)
        update = first.div_(second.sqrt_().add_(options["eps"]))
        if not self._is_adapted(parameter_shard):
            return update
        return update.add_(
            self._weights(state_buffer, parameter_shard), alpha=options["weight_decay"]
        )

    def _is_adapted(self, parameter_shard: ParameterShard) -> bool:
        """Whether it is one of those that decay, whatever their decay is: then it has a ratio."""
        number = self._groups.number_of[parameter_shard.name]
        return number in self._groups.decay_everything or self._decays(
            parameter_shard.name, parameter_shard.layout
        )

    def _weights(self, state_buffer: StateBuffer, parameter_shard: ParameterShard) -> Tensor:
        main = state_buffer.updated
        assert main is not None
        return main[slice(*parameter_shard.span)]

    def _ratios(self, factor: Factor) -> Tensor:
        """[parameters] float64: norms of whole parameters over those of their steps; 1 where one of both is 0."""
        squares = torch.zeros(len(self._place), 2, dtype=torch.float64, device=self.ps.device)
        for state_buffer, parameter_shard in self._parts:
            weights, step = (
                self._weights(state_buffer, parameter_shard),
                self._adam_step(state_buffer, parameter_shard, factor),
            )
            pair = torch.stack(
                [torch.linalg.vector_norm(t, dtype=torch.float64) for t in (weights, step)]
            )
            squares[self._place[parameter_shard.name]] += pair.square()
        for group, places in self._sums:
            squares[places] = all_reduce(squares[places], group)
        weights, steps = squares.sqrt().unbind(1)
        return torch.where((weights > 0) & (steps > 0), weights / steps, 1.0)
