"""Adafactor on flat buffers: second moments of matrices by row and column, however the matrices are cut."""

from typing import Any

import torch
from torch import Tensor

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import GroupOptions
from core.optimizer.state.flat_shard import Decays, ParameterShard, default_decays
from core.optimizer.state.kernels import Factor
from core.optimizer.state.sharded_states import OptimizerShard
from core.optimizer.state.state_buffers import StateBuffer
from core.optimizer.whole.by_parameter import UpdatesByParameter
from core.optimizer.whole.factored import FactoredMatrix
from core.parallel_state.collectives import all_reduce
from core.parallel_state.layout import Layout, layout_of


class ShardedAdafactor(UpdatesByParameter):
    """Adafactor (arXiv 1804.04235, without a momentum) with the numbers of torch.optim.Adafactor in one process.

    Matrices are those of `FactoredMatrix`: of our fused linears [out, in]. Biases and what has one dim keep a second
    moment of each element ("variance"), matrices its means over rows and over columns ("row_var" [rows], "col_var"
    [columns], of a stack one each), which every rank of the data and tensor groups holds in full.
    A step all-reduces the sums of squares of rows and columns, then two numbers per parameter, over the ranks that
    hold its parts. Scratch: a few tensors of the size of this rank's largest parameter.
    Raises ValueError: main_params=False.
    """

    def __init__(
        self,
        shard: DataParallel,
        config: OptimizerConfig,
        *,
        decays: Decays | None = None,
        groups: GroupOptions = (),
    ) -> None:
        super().__init__(shard, config, decays=decays, groups=groups)
        self._matrices: dict[str, FactoredMatrix] = {}
        self._means: dict[str, tuple[Tensor, Tensor]] = {}
        for buffer in shard.buffers:
            for slot, parameter in zip(buffer.bucket.slots, buffer.parameters, strict=True):
                if not self.is_factored(slot.name, layout_of(parameter)):
                    continue
                matrix = FactoredMatrix.of(slot.name, parameter, self.ps)
                self._matrices[slot.name] = matrix
                row_var = torch.zeros(
                    matrix.stack, matrix.rows, dtype=self._dtype, device=self.ps.device
                )
                self._means[slot.name] = row_var, row_var.new_zeros(matrix.stack, matrix.columns)
        # a cut between matrices of a stack leaves their sums whole
        first_dims = {name: matrix.first_dim for name, matrix in self._matrices.items()}
        self._sums_of_means = self.cut_over(first_dims)
        numels = [layout_of(parameter).numel for parameter in shard.named_parameters().values()]
        self._numel = torch.tensor(numels, dtype=torch.float64, device=self.ps.device)

    def options(self, config: OptimizerConfig) -> dict[str, Any]:
        """As torch.optim.Adafactor names them."""
        return {
            "lr": config.lr,
            "beta2_decay": config.adafactor_beta2_decay,
            "eps": (config.adafactor_eps1, config.adafactor_eps2),
            "d": config.adafactor_d,
            "weight_decay": config.weight_decay,
        }

    def is_factored(self, name: str, layout: Layout) -> bool:
        """Whether its second moment is that of rows and columns: of two dims at least, no bias."""
        return default_decays(name, layout)

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """Of a matrix none for each element."""
        return () if self.is_factored(name, layout) else ("variance",)

    def whole_states(self) -> dict[str, dict[str, OptimizerShard]]:
        """row_var and col_var of every matrix, live."""
        states: dict[str, dict[str, OptimizerShard]] = {}
        for name, means in self._means.items():
            matrix = self._matrices[name]
            states[name] = {}
            for kind, mean in zip(("row_var", "col_var"), means, strict=True):
                layout = matrix.shard_layout(mean.shape[1])
                box = layout.box(self.ps.coordinate, self.ps.sizes)
                states[name][kind] = OptimizerShard(
                    mean if matrix.first_dim else mean[0], layout, box
                )
        return states

    def update_rest(self, factor: Factor) -> None:
        """Second moments, then norms, then weights: nothing waits for an accelerator. All-reduces, see the class."""
        self._update_means(factor)
        for state_buffer, parameter_shard in self._parts:
            if parameter_shard.name not in self._matrices:
                self._update_variance(state_buffer, parameter_shard, factor)
        norms = self._norms(factor)
        active = 1.0 - factor.found_inf.double()
        for state_buffer, parameter_shard in self._parts:
            name = parameter_shard.name
            if name in self._reached.left_out:
                continue
            options = self.options_of(name)
            weight_norm, update_norm = norms[self._place[name]]
            # torch's names: rho the relative rate, alpha the rate
            rho = self.updates_of(name, factor).rsqrt().clamp(max=options["lr"])
            alpha = weight_norm.clamp(min=options["eps"][1]) * rho
            rate = active * alpha / (update_norm / options["d"]).clamp(min=1.0)
            weights = self.weights_of(state_buffer, parameter_shard)
            if self.decays_at_all(parameter_shard) and options["weight_decay"]:
                weights.mul_(1 - active * (options["lr"] * options["weight_decay"]))
            weights.sub_(self._update_of(state_buffer, parameter_shard, factor).mul_(rate))

    def _share(self, name: str, factor: Factor) -> Tensor:
        """1 - beta2 of this update in the states' dtype; 0 where the step is skipped."""
        share: Tensor = self.updates_of(name, factor) ** self.options_of(name)["beta2_decay"]
        return (share * (1.0 - factor.found_inf.double())).to(self._dtype)

    def _update_means(self, factor: Factor) -> None:
        """Of every matrix, on every rank that holds any part of it."""
        sums = {name: [torch.zeros_like(m) for m in means] for name, means in self._means.items()}
        for state_buffer, parameter_shard in self._parts:
            matrix = self._matrices.get(parameter_shard.name)
            if matrix is not None:
                squares = self.gradient_of(state_buffer, parameter_shard, factor).square_()
                found = matrix.sums(squares, parameter_shard.interval)
                for total, part in zip(sums[matrix.name], found, strict=True):
                    total.add_(part)
        for group, names in self._sums_of_means:
            flat = [vector for name in names for vector in sums[name]]
            summed = all_reduce(torch.cat([vector.flatten() for vector in flat]), group)
            pieces = summed.split([vector.numel() for vector in flat])
            for vector, piece in zip(flat, pieces, strict=True):
                vector.copy_(piece.view_as(vector))
        for name, (row_var, col_var) in self._means.items():
            if name not in self._reached.left_out:
                matrix = self._matrices[name]
                share = self._share(name, factor)
                row_sums, column_sums = sums[name]
                row_var.lerp_(row_sums.div_(matrix.columns), share)
                col_var.lerp_(column_sums.div_(matrix.rows), share)

    def _update_variance(
        self, state_buffer: StateBuffer, parameter_shard: ParameterShard, factor: Factor
    ) -> None:
        if parameter_shard.name in self._reached.left_out:
            return
        variance = state_buffer.states["variance"][slice(*parameter_shard.span)]
        squares = self.gradient_of(state_buffer, parameter_shard, factor).square_()
        variance.lerp_(squares, self._share(parameter_shard.name, factor))

    def _update_of(
        self, state_buffer: StateBuffer, parameter_shard: ParameterShard, factor: Factor
    ) -> Tensor:
        """The gradient over the root of the second moment, before it is clipped; flat, of this rank's part."""
        name = parameter_shard.name
        eps1 = self.options_of(name)["eps"][0]
        if eps1 is None:
            eps1 = torch.finfo(self._dtype).eps
        if name in self._matrices:
            row_var, col_var = self._means[name]
            by_row = row_var / row_var.mean(1, keepdim=True).clamp_(min=eps1)
            estimate = self._matrices[name].spread(by_row, col_var, parameter_shard.interval)
        else:
            estimate = state_buffer.states["variance"][slice(*parameter_shard.span)].clone()
        update = estimate.clamp_(min=eps1 * eps1).rsqrt_()
        return update.mul_(self.gradient_of(state_buffer, parameter_shard, factor))

    def _norms(self, factor: Factor) -> Tensor:
        """[parameters, 2] float64: root mean squares of whole weights, and of their updates."""
        squares = torch.zeros(len(self._place), 2, dtype=torch.float64, device=self.ps.device)
        for state_buffer, parameter_shard in self._parts:
            weights = self.weights_of(state_buffer, parameter_shard)
            update = self._update_of(state_buffer, parameter_shard, factor)
            pair = torch.stack(
                [torch.linalg.vector_norm(t, dtype=torch.float64) for t in (weights, update)]
            )
            squares[self._place[parameter_shard.name]] += pair.square()
        self.sum_by_parameter(squares)
        return (squares / self._numel.unsqueeze(1)).sqrt()
