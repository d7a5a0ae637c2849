"""What keeps experts evenly used: auxiliary losses, the same numbers on every layout.

The objective is the sum over tokens of the loss, plus the sum over layers and positions of alpha * aux + zeta * z,
over the number of tokens. Nothing divides in backward: each rank adds the gradient of its own positions, times what
the loss was multiplied by, and an optimizer divides by the tokens.

    aux = E sum_e f_e P_e         f_e: the share of rows routed to expert e, P_e: its mean score (arXiv 2101.03961)
    z   = logsumexp(logits)^2     (arXiv 2202.08906)

aux is 1 when all experts are used alike (transformers' is k times that). f has no gradient, so P's part of a position
needs nothing of other positions but f: one all-reduce of counts over the ranks that share a sequence.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from core.autograd.bag import StageContext
from core.autograd.recomputation.notes import note
from core.parallel_state.collectives import all_reduce
from core.transformer.moe.router import Router, Routing
from core.transformer.spec import Build


class _Attach(torch.autograd.Function):
    """y, whose backward also starts the gradient of `loss`: what the model's own loss was multiplied by."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, stage: StageContext, positions: int) -> Tensor:
        ctx.stage, ctx.positions, ctx.driven = stage, positions, stage.driven
        ctx.like = loss.new_empty(())
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        scale = ctx.stage.loss_scale if ctx.driven else ctx.stage.scale_of_plain_loop
        if ctx.driven and ctx.stage.averaged_over is not None:
            scale = scale / (ctx.stage.averaged_over * ctx.positions)
        if scale is None:
            scale = 1 / ctx.positions
            warnings.warn(
                "auxiliary losses of experts are added to a loss that the model did not compute: it is taken for a "
                "mean over positions. Give the model labels=, or train with SingleStage or Pipeline, and they get "
                "the scale of each token's loss",
                stacklevel=2,
            )
        if isinstance(scale, Tensor):
            return gradient, scale.to(ctx.like), None, None
        return gradient, torch.full_like(ctx.like, scale), None, None


def follow_loss(loss: Tensor, stage: StageContext, *, is_models: bool) -> None:
    """In a plain loop: note what the program multiplies each token's loss [b, s] by, when its backward comes by."""

    stage.scale_of_plain_loop = None  # what an earlier loss was multiplied by says nothing of this one
    if not is_models:
        return

    def remember(gradient: Tensor) -> None:
        stage.scale_of_plain_loop = gradient.sum() / gradient.count_nonzero().clamp(min=1)

    loss.register_hook(remember)


class Balance:
    """The auxiliary losses of one layer. seq_aux_loss: f of each sequence; aux_loss: of the microbatch;
    global_aux_loss: of the global batch before, because what was counted so far in this one depends on the schedule
    and on the data ranks; in the first step f is 1/E.
    """

    def __init__(self, build: Build, router: Router) -> None:
        config, self._ps, self._router = build.config, build.parallel, router
        assert config.num_moe_experts is not None
        self._experts, self._stage = config.num_moe_experts, build.stage
        self.is_on = config.balances_experts  # whether there is anything to attach
        self._of_sequence = config.moe_router_load_balancing_type == "seq_aux_loss"
        balances = config.moe_router_load_balancing_type != "none"
        self._aux_coefficient = config.moe_aux_loss_coeff if balances else 0.0
        self._z_coefficient = config.moe_z_loss_coeff or 0.0

    def attach(self, y: Tensor, routing: Routing, sequences: int) -> Tensor:
        """y [s, b, h] of this rank's positions, its backward carrying the losses' gradients; sequences: b.

        All-reduce of [b, E] counts over tp and cp, noted for a second run.
        """
        loss = routing.logits.new_zeros(())
        sums: dict[str, Tensor] = {}
        if self._aux_coefficient:
            with torch.no_grad():
                if self._router.rows_of_last_step is not None:
                    shares = self._shares_before(self._router.rows_of_last_step)
                else:
                    (shares,) = note(lambda: (self._shares(routing, sequences),))
            by_position = routing.scores.view(-1, sequences, self._experts)
            sums["aux"] = self._experts * (by_position * shares).sum()
            loss = loss + self._aux_coefficient * sums["aux"]
        if self._z_coefficient:
            sums["z"] = routing.logits.logsumexp(-1).square().sum()
            loss = loss + self._z_coefficient * sums["z"]
        if self._router.load.is_logged:
            note(lambda: self._logged(sums))
        ps = self._ps
        positions = routing.logits.shape[0] * ps.size("tp")
        attached: Tensor = _Attach.apply(y, loss, self._stage, positions)
        return attached

    def _logged(self, sums: dict[str, Tensor]) -> tuple[()]:
        self._router.load.add_losses(sums)
        return ()

    def _shares_before(self, rows: Tensor) -> Tensor:
        """f [1, E] of the global batch before this one."""
        total = rows.sum()
        return torch.where(total > 0, rows / total.clamp(min=1), 1 / self._experts)[None]

    def _shares(self, routing: Routing, sequences: int) -> Tensor:
        """f: [b, E], or [1, E] of the microbatch. Rows are [s, b], flattened, with k experts each."""
        positions = routing.experts.shape[0]
        column = torch.arange(positions, device=routing.experts.device) % sequences
        cells = (column[:, None] * self._experts + routing.experts).reshape(-1)
        counts = torch.zeros(sequences * self._experts, dtype=routing.scores.dtype, device=cells.device)
        counts.scatter_add_(0, cells, torch.ones_like(cells, dtype=counts.dtype))
        counts = counts.view(sequences, self._experts)
        counts = all_reduce(all_reduce(counts, self._ps.group("tp")), self._ps.group("cp"))
        if not self._of_sequence:
            counts = counts.sum(0, keepdim=True)
        return counts / counts.sum(1, keepdim=True)
