"""What keeps experts evenly used: auxiliary losses, the same numbers on every layout.

The objective is the sum over tokens of the loss, plus the sum over layers and positions of alpha * aux + zeta * z,
over the number of tokens. Nothing divides in backward: each rank adds the gradient of its own positions, times what
the loss was multiplied by, and an optimizer divides by the tokens.

    aux = E sum_e f_e P_e         f_e: the share of rows routed to expert e, P_e: its mean score (arXiv 2101.03961);
                                  with groups or an expert bias f is of the k largest scores (arXiv 2412.19437, 18)
    z   = logsumexp(logits)^2     (arXiv 2202.08906)

aux is 1 when all experts are used alike (transformers' is k times that). f has no gradient, so P's part of a position
needs nothing of other positions but f: one all-reduce of counts over the ranks that share a sequence.
"""

import warnings
from typing import Any, cast

import torch
from torch import Tensor

from core.autograd.bag import StageContext
from core.autograd.gradients import no_second_derivative
from core.autograd.recomputation.notes import note
from core.parallel_state.collectives import all_reduce, start_all_reduce
from core.parallel_state.collectives.ops import Done, PendingCollective
from core.transformer.moe.load import Load
from core.transformer.moe.router import Router, Routing
from core.transformer.spec import Build


class _Attach(torch.autograd.Function):
    """y, whose backward also starts the gradient of `loss`: what the model's own loss was multiplied by."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, stage: StageContext, positions: int) -> Tensor:
        ctx.stage = stage
        ctx.positions = positions
        ctx.driven = stage.driven
        ctx.like = loss.new_empty(())
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.driven:
            scale = ctx.stage.loss_scale
        else:
            scale = ctx.stage.scale_of_plain_loop
        if ctx.driven and ctx.stage.averaged_over is not None:
            # the program takes means over microbatches of means over tokens, where we sum
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

    # what an earlier loss was multiplied by says nothing of this one
    stage.scale_of_plain_loop = None
    if not is_models:
        return

    def remember(gradient: Tensor) -> None:
        # tokens without a label have gradient 0; all others have the same one
        stage.scale_of_plain_loop = gradient.sum() / gradient.count_nonzero().clamp(min=1)

    loss.register_hook(remember)


class Balance:
    """The auxiliary losses of one layer. seq_aux_loss: f of each sequence; aux_loss: of the microbatch;
    global_aux_loss: of the global batch before, because what was counted so far in this one depends on the schedule
    and on the data ranks; in the first step f is 1/E.
    """

    def __init__(self, build: Build, router: Router) -> None:
        config = build.config
        self._ps = build.parallel
        self._router = router
        assert config.num_moe_experts is not None
        self._experts = config.num_moe_experts
        self._stage = build.stage
        # whether there is anything to attach
        self.is_on = config.balances_experts
        self._of_sequence = config.moe_router_load_balancing_type == "seq_aux_loss"
        balances = config.moe_router_load_balancing_type != "none"
        if balances:
            self._aux_coefficient = config.moe_aux_loss_coeff
        else:
            self._aux_coefficient = 0.0
        self._z_coefficient = config.moe_z_loss_coeff or 0.0

    def attach(self, y: Tensor, routing: Routing, sequences: int) -> Tensor:
        """y [s, b, h] of this rank's positions, its backward carrying the losses' gradients; sequences: b.

        All-reduce of [b, E] counts over tp and cp, noted for a second run: started here, waited for in backward.
        """
        loss = routing.logits.new_zeros(())
        load = self._router.load
        if self._aux_coefficient:
            with torch.no_grad():
                shares = self._start_shares(routing, sequences)
            by_position = routing.scores.view(-1, sequences, self._experts)
            loss = loss + self._aux_coefficient * _Auxiliary.apply(by_position, shares, load)
        if self._z_coefficient:
            z = routing.logits.logsumexp(-1).square().sum()
            loss = loss + self._z_coefficient * z
            if load.is_logged:
                note(lambda: self._logged(z))
        ps = self._ps
        positions = routing.logits.shape[0] * ps.size("tp")
        attached: Tensor = _Attach.apply(y, loss, self._stage, positions)
        return attached

    def _logged(self, z: Tensor) -> tuple[()]:
        self._router.load.add_losses({"z": z})
        return ()

    def _start_shares(self, routing: Routing, sequences: int) -> "_Shares":
        """f, whose sum over the ranks that share a sequence is under way; noted for a second run."""
        if self._router.rows_of_last_step is not None:
            return _Shares(Done(self._rows_before(self._router.rows_of_last_step)))
        (shares,) = note(lambda: (_Shares(self._start_counts(routing, sequences)),))
        return cast(_Shares, shares)

    def _rows_before(self, rows: Tensor) -> Tensor:
        """[1, E] of the global batch before this one; alike before the first."""
        return torch.where(rows.sum() > 0, rows, torch.ones_like(rows))[None]

    def _start_counts(self, routing: Routing, sequences: int) -> PendingCollective:
        """Rows per expert: [b, E], or [1, E] of the microbatch. Rows are [s, b], flattened, with k experts each."""
        experts = routing.experts
        if not self._router.prefers_by_scores:
            experts = routing.scores.topk(experts.shape[1], dim=-1, sorted=False).indices
        positions = experts.shape[0]
        column = torch.arange(positions, device=experts.device) % sequences
        # a bin for each (sequence, expert), so that one scatter counts all of them
        cells = (column[:, None] * self._experts + experts).reshape(-1)
        counts = torch.zeros(
            sequences * self._experts, dtype=routing.scores.dtype, device=cells.device
        )
        counts.scatter_add_(0, cells, torch.ones_like(cells, dtype=counts.dtype))
        counts = counts.view(sequences, self._experts)
        if not self._of_sequence:
            counts = counts.sum(0, keepdim=True)
        groups = [group for name in ("tp", "cp") if (group := self._ps.group(name)) is not None]
        # a sum needs the one before it: only the last can be left under way
        for group in groups[:-1]:
            counts = all_reduce(counts, group)
        return start_all_reduce(counts, groups[-1] if groups else None)


class _Shares:
    """f = the share of rows that each expert was given, [b, E] or [1, E]; asked for when backward needs it."""

    def __init__(self, counts: PendingCollective) -> None:
        self._counts: PendingCollective | None = counts
        self._shares: Tensor | None = None

    def wait(self) -> Tensor:
        if self._shares is None:
            assert self._counts is not None
            counts = self._counts.wait()
            self._counts = None
            self._shares = counts / counts.sum(1, keepdim=True)
        return self._shares


class _Auxiliary(torch.autograd.Function):
    """E sum_e f_e P_e, summed over the positions of scores [s, b, E]: nobody reads it, backward alone needs f.

    What forward returns stands for its value and is 0, so that nothing waits for the counts before backward does. A
    log gets the value then.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, shares: _Shares, load: Load) -> Tensor:
        ctx.shares = shares
        ctx.load = load
        ctx.shape = scores.shape
        ctx.scores = scores.sum(0) if load.is_logged else None
        return scores.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise no_second_derivative("the auxiliary loss of experts")
        shares = ctx.shares.wait().to(gradient.dtype)
        experts = ctx.shape[-1]
        if ctx.scores is not None:
            ctx.load.add_losses({"aux": experts * (ctx.scores * shares).sum()})
        return (gradient * experts * shares).expand(ctx.shape), None, None
