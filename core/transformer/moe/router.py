"""Which experts a token goes to, and with which weight."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.autograd.recomputation.notes import note
from core.parallel_state import Init, Layout
from core.tensor_parallel import sum_gradient
from core.transformer.spec import Build

_TINY = 1e-20  # beside a sum of sigmoids that is divided by, as DeepSeek-V3 and Megatron have it


@dataclass(frozen=True, eq=False)
class Routing:
    """Of T tokens to k of E experts each. experts: int64 [T, k], in order of preference. weights: [T, k].

    scores: [T, E], of all experts, sum 1; logits: [T, E]. float32 at least, as are the weights.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


class Router(nn.Module):
    """Scores every expert for every token: x [T, h] -> `Routing`.

    weight: [E, h], whole on every rank; each tensor rank routes tokens of its own, so gradients are partial over tp.
    score function "softmax": the k largest logits, softmax over these (Mixtral, Qwen3-MoE); with pre_softmax over
    all experts, and the k largest probabilities as they are. "sigmoid" (DeepSeek-V3, arXiv 2412.19437): the k largest
    scores, divided by their sum; with groups, of the best groups only (by the sum of their two largest scores). Both
    times `moe_router_topk_scaling_factor`.

    The choice is noted: a recomputed forward takes the first run's, so that near ties cannot route otherwise.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        assert config.num_moe_experts is not None
        experts, self.top_k = config.num_moe_experts, config.moe_router_topk
        self.sigmoid, self.pre_softmax = config.moe_router_score_function == "sigmoid", config.moe_router_pre_softmax
        self.scaling = config.moe_router_topk_scaling_factor
        self.num_groups, self.group_topk = config.moe_router_num_groups, config.moe_router_group_topk
        self.group = build.parallel.group("tp")
        layout = Layout((experts, config.hidden_size), partial=frozenset({"tp"}))
        self.weight = build.place.parameter(layout, Init(std=config.init_method_std))

    def forward(self, x: Tensor) -> Routing:
        """x [T, h] of this rank's tokens."""
        weight = self.weight if self.group is None else sum_gradient(self.weight, self.group)
        dtype = torch.promote_types(x.dtype, torch.float32)
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                logits = F.linear(x.to(dtype), weight.to(dtype))
        else:
            logits = F.linear(x.to(dtype), weight.to(dtype))
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        (experts,) = note(lambda: (self._chosen(scores.detach()),))
        if self.sigmoid:
            weights = scores.gather(1, experts)
            if self.top_k > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
            scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
        elif self.pre_softmax:
            weights = scores.gather(1, experts)
        else:
            weights = logits.gather(1, experts).softmax(-1)
        if self.scaling is not None:
            weights = weights * self.scaling
        return Routing(experts, weights, scores, logits)

    def _chosen(self, scores: Tensor) -> Tensor:
        """[T, E] -> int64 [T, k]."""
        # in order of the scores alone: softmax keeps the order of logits
        preference = scores
        if self.num_groups is not None and self.group_topk is not None:
            by_group = preference.unflatten(1, (self.num_groups, -1))
            group_scores = by_group.topk(min(2, by_group.shape[2]), dim=-1).values.sum(-1)
            best = group_scores.topk(self.group_topk, dim=-1, sorted=False).indices
            left_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
            preference = by_group.masked_fill(left_out[..., None], -torch.inf).flatten(1)
        return preference.topk(self.top_k, dim=-1).indices
