"""The experts of a layer that this rank holds: as many feed-forward parts, each on the rows routed to it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from core.autograd.gradients import has_main_grad, no_second_derivative
from core.autograd.grouped import grouped_linear
from core.parallel_state import Init, Layout
from core.parallel_state.spread import SpreadModule
from core.tensor_parallel import sum_gradient
from core.transformer.activations import Activation, gated, silu_gate_gradient
from core.transformer.spec import Build


class Weight(SpreadModule):
    """A parameter called weight, so that names are those of linears: `experts.linear_fc1.weight`."""

    def __init__(self, build: Build, layout: Layout, std: float) -> None:
        super().__init__()
        self.weight = build.place.parameter(layout, Init(std=std), build.parallel.sizes)


class Experts(torch.nn.Module):
    """linear_fc1.weight [E/ep, f, h], or gated [E/ep, 2, f, h]; linear_fc2.weight [E/ep, h, f]. No biases.

    Whole experts lie on each rank; tensor ranks take tokens of their own instead of columns (ep folds over tp).
    Gradients are sums over the ranks with the same experts (edp), by `DataParallel` or whoever sets `edp_is_summed`;
    in a plain loop they are summed in backward over the tensor ranks, and by DDP over the data ranks.
    Raises ValueError: a plain loop on data ranks that hold other experts, which nobody would keep apart.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        assert config.num_moe_experts is not None
        experts = config.num_moe_experts
        ffn = config.moe_ffn
        hidden = config.hidden_size
        self.gated = config.gated_linear_unit
        self.activation = config.activation
        self.stage = build.stage
        self.fp8 = build.place.fp8
        fc1_shape = (experts, 2, ffn, hidden) if self.gated else (experts, ffn, hidden)
        self.linear_fc1 = Weight(build, Layout(fc1_shape, {"ep": 0}), config.init_method_std)
        self.linear_fc2 = Weight(
            build, Layout((experts, hidden, ffn), {"ep": 0}), config.output_std
        )
        ps = build.parallel
        # set by a wrapper that sums .grad over edp itself
        self.edp_is_summed = False
        self._has_data_ranks = ps.size("dp-cp") > 1
        self._ranks = ps.size("ep")
        # over whom a plain loop's gradients are summed here: with data ranks DDP sums over those
        if self._has_data_ranks:
            self._sum_group = ps.group("tp")
        else:
            self._sum_group = ps.group("edp")

    def forward(self, rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
        """rows [n, h] sorted by expert, weights [n, 1] -> [n, h], each expert's output times its weight."""
        fc1 = self._summed(self.linear_fc1.weight)
        fc2 = self._summed(self.linear_fc2.weight)
        y = grouped_linear(rows, fc1, counts, stage=self.stage, fp8=self.fp8)
        # The weight multiplies before fc2, which is linear: its gradient needs no outputs of the experts.
        y = _WeightedActivation.apply(y, weights, self.activation, self.gated)
        return grouped_linear(y, fc2, counts, stage=self.stage, fp8=self.fp8)

    def _summed(self, weight: Parameter) -> Tensor:
        """The weight; in a plain loop one whose gradient is summed over the ranks that DDP does not know."""
        has_owner = self.edp_is_summed or has_main_grad(weight) or hasattr(weight, "take_main_grad")
        if has_owner or not (torch.is_grad_enabled() and weight.requires_grad):
            return weight
        if self._has_data_ranks and self._ranks > 1:
            raise ValueError(
                f"the experts are spread over expert={self._ranks} ranks, several data ranks among them, and nobody "
                "sums their gradients: a plain .grad and DDP take all data ranks for copies of one model; wrap the "
                "model in core.data_parallel.DataParallel"
            )
        if self._sum_group is None:
            return weight
        return sum_gradient(weight, self._sum_group)


def _activate(y: Tensor, activation: Activation, is_gated: bool) -> Tensor:
    if is_gated:
        return gated(y, activation)
    return activation(y)


class _WeightedActivation(torch.autograd.Function):
    """activation(y) * weight, keeping y and the weight only; the activation is computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weights: Tensor, activation: Activation, is_gated: bool
    ) -> Tensor:
        ctx.save_for_backward(y, weights)
        ctx.activation = activation
        ctx.is_gated = is_gated
        return _activate(y, activation, is_gated).mul_(weights.to(y.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("the experts' activation")
        y, weights = ctx.saved_tensors
        if ctx.is_gated and ctx.activation is F.silu:
            # linear in the weight, which comes last: nothing is computed both with it and without it
            dy = silu_gate_gradient(y, gradient)
            # (gradient * silu(gate)) * up
            by_weight = dy.chunk(2, -1)[1] * y.chunk(2, -1)[1]
            dy.mul_(weights.to(y.dtype))
        else:
            with torch.enable_grad():
                leaf = y.detach().requires_grad_()
                activated = _activate(leaf, ctx.activation, ctx.is_gated)
            (dy,) = torch.autograd.grad(activated, leaf, gradient * weights.to(y.dtype))
            by_weight = gradient * activated.detach()
        return dy, by_weight.sum(-1, keepdim=True, dtype=weights.dtype), None, None
