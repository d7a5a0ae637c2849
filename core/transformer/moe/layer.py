"""The feed-forward part with experts: route, send, compute, send back, add."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from core.tensor_parallel import gather_from_sequence_region, scatter_to_sequence_region
from core.transformer.mlp import MLP
from core.transformer.moe.balance import Balance
from core.transformer.moe.dispatch import (
    Dispatch,
    from_experts,
    start_to_experts,
    weights_to_experts,
)
from core.transformer.moe.experts import Experts
from core.transformer.moe.router import Router
from core.transformer.spec import Build


class MoELayer(nn.Module):
    """x [s, b, h] -> [s, b, h] ([s/tp, b, h] each way under sequence parallelism).

    Inside, tokens are always shards over tp: as they come under sequence parallelism, else cut at entry and gathered
    at exit. So no token is routed twice, and ep may fold over tp. Shared experts are a dense MLP, split over tp.
    Collectives: see `dispatch`, `balance`; without sequence parallelism an all-gather over tp each way.
    Raises ValueError: s that does not divide over tp; several ranks that hold the same experts, and nobody who sums
    their gradients.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        ps = build.parallel
        assert config.num_moe_experts is not None
        self.parallel = ps
        self._tensor_group = ps.group("tp")
        self._expert_group = ps.group("ep")
        self.router = Router(build)
        self.experts = Experts(build)
        self.balance = Balance(build, self.router)
        self.shared_experts: MLP | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            shared = replace(config, ffn_hidden_size=config.moe_shared_expert_intermediate_size)
            self.shared_experts = MLP(replace(build, config=shared))
        self._cuts_tokens = ps.size("tp") > 1 and not build.place.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], sharded alike."""
        if torch.compiler.is_compiling():
            return self._outside_graphs(x)
        return self._forward(x)

    @torch.compiler.disable
    def _outside_graphs(self, x: Tensor) -> Tensor:
        """How many rows go where is known on the host only: a graph cannot hold it."""
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        tp = self._tensor_group
        if self._cuts_tokens:
            # each tensor rank routes a share of the tokens, which all of them hold
            shard = scatter_to_sequence_region(self._padded(x), tp)
        else:
            shard = x
        tokens = shard.reshape(-1, shard.shape[-1])
        routing = self.router(tokens)
        dispatch = Dispatch.plan(routing, self.router, self._expert_group)
        arriving = start_to_experts(tokens, dispatch)
        # computed while the rows are on their way
        if self.shared_experts is None:
            shared = None
        else:
            shared = self.shared_experts(x)
        rows = arriving()
        weights = weights_to_experts(routing.weights, dispatch)
        y = from_experts(self.experts(rows, weights, dispatch.counts), dispatch).view(shard.shape)
        # in both runs of a recomputed forward
        if self.balance.is_on and self.training:
            y = self.balance.attach(y, routing, sequences=shard.shape[1])
        if self._cuts_tokens:
            y = gather_from_sequence_region(y, tp, to_tensor_region=False)[: x.shape[0]]
        if shared is None:
            return y
        return y + shared

    def _padded(self, x: Tensor) -> Tensor:
        """Rows of zeros to a multiple of tp, for a generated token; in training rows would count for the balance."""
        missing = -x.shape[0] % self.parallel.size("tp")
        if missing and torch.is_grad_enabled():
            raise ValueError(
                f"sequence length {x.shape[0]} does not divide over {self.parallel.size('tp')} tensor-parallel ranks "
                f"that route tokens of their own; pad it to {x.shape[0] + missing}"
            )
        if missing:
            return torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
        return x
