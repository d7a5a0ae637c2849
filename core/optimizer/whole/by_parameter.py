"""What updates of whole parameters share: this rank's parts, and sums over all ranks that hold the others."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import GroupOptions
from core.optimizer.sharded import ShardedOptimizer
from core.optimizer.state.flat_shard import Decays, ParameterShard
from core.optimizer.state.kernels import Factor, adamw
from core.optimizer.state.state_buffers import StateBuffer
from core.parallel_state.collectives import Group, all_reduce
from core.parallel_state.layout import Layout, layout_of


class UpdatesByParameter(ShardedOptimizer):
    """An update, in `update_rest`, parameter by parameter, of which each rank sees its own elements.

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
                f"{config.optimizer} updates main parameters, but main_params=False; use main_params=True"
            )
        super().__init__(shard, config, decays=decays, groups=groups)
        self._parts = [
            (state_buffer, parameter_shard)
            for state_buffer in self._state_buffers
            for parameter_shard in state_buffer.parameter_shards
        ]
        self._place = {name: place for place, name in enumerate(shard.named_parameters())}
        device = self.ps.device
        self._sums = [
            (group, torch.tensor([self._place[name] for name in names], device=device))
            for group, names in self.cut_over()
        ]

    def fused(self, name: str, layout: Layout) -> bool:
        """None: an update is known only when all parts of a parameter are."""
        return False

    def cut_over(self, first_dim: Mapping[str, int] | None = None) -> list[tuple[Group, list[str]]]:
        """Groups over whose ranks parameters are cut, and which; in one order on all ranks of each group.

        first_dim: name -> the dim before which a cut does not count; default: all cuts of all parameters do. Of a
        parameter that is not in it none does.
        """
        names: dict[int, tuple[Group, list[str]]] = {}
        for buffer in self.shard.buffers:
            for slot, parameter in zip(buffer.bucket.slots, buffer.parameters, strict=True):
                if first_dim is not None and slot.name not in first_dim:
                    continue
                least = 0 if first_dim is None else first_dim[slot.name]
                split = layout_of(parameter).split
                axes = [a for a, dim in split.items() if dim >= least and self.ps.size(a) > 1]
                groups = [buffer.ranks if buffer.stage else None, *map(self.ps.group, axes)]
                for group in filter(None, groups):
                    names.setdefault(id(group), (group, []))[1].append(slot.name)
        return list(names.values())

    def sum_by_parameter(self, values: Tensor) -> None:
        """values [parameters, n] of this rank's elements -> of all, in place. An all-reduce for each group."""
        for group, places in self._sums:
            values[places] = all_reduce(values[places], group)

    def options_of(self, name: str) -> dict[str, Any]:
        """Of the parameter's group."""
        return self.param_groups[self._groups.number_of[name]]

    def decays_at_all(self, parameter_shard: ParameterShard) -> bool:
        """Whether it is one of those that decay, whatever their decay is."""
        number = self._groups.number_of[parameter_shard.name]
        return number in self._groups.decay_everything or self._decays(
            parameter_shard.name, parameter_shard.layout
        )

    def weights_of(self, state_buffer: StateBuffer, parameter_shard: ParameterShard) -> Tensor:
        """This rank's elements of the main weights, live and flat."""
        main = state_buffer.updated
        assert main is not None
        return main[slice(*parameter_shard.span)]

    def gradient_of(
        self, state_buffer: StateBuffer, parameter_shard: ParameterShard, factor: Factor
    ) -> Tensor:
        """This rank's elements of the averaged gradient, a copy in the main weights' dtype; 0 in a skipped step."""
        gradient = state_buffer.gradients[slice(*parameter_shard.span)].to(self._dtype)
        # 0 for what is not finite: nothing is added then, but 0 times NaN would be NaN
        return (gradient / factor.divisor).masked_fill_(factor.found_inf.bool(), 0.0)

    def updates_of(self, name: str, factor: Factor) -> Tensor:
        """The parameter's own count of updates, this one too: float64, shape [], at least 1."""
        return (factor.step.double() - self._reached.behind.get(name, 0)).clamp(min=1)
