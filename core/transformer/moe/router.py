"""Which experts a token goes to, and with which weight."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from core.autograd.recomputation.notes import note
from core.parallel_state import Init, Layout
from core.parallel_state.spread import SpreadModule
from core.tensor_parallel import sum_gradient
from core.transformer.moe.load import Load, Loads
from core.transformer.spec import Build

# beside a sum of sigmoids that is divided by, as DeepSeek-V3 and Megatron have it
_TINY = 1e-20


@dataclass(frozen=True, eq=False)
class Routing:
    """Of T tokens to k of E experts each. experts: int64 [T, k], in order of preference. weights: [T, k].

    scores: [T, E], of all experts, sum 1; logits: [T, E]. float32 at least, as are the weights.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


class Router(SpreadModule):
    """Scores every expert for every token: x [T, h] -> `Routing`.

    weight: [E, h], whole on every rank; each tensor rank routes tokens of its own, so gradients are partial over tp.
    score function "softmax": the k largest logits, softmax over these (Mixtral, Qwen3-MoE); with pre_softmax over
    all experts, and the k largest probabilities as they are. "sigmoid" (DeepSeek-V3, arXiv 2412.19437): the k largest
    scores, divided by their sum. Both times `moe_router_topk_scaling_factor`; with groups, of the best groups only,
    by the sum of their `moe_router_group_score_topk` largest scores (DeepSeek-V3: 2; DeepSeek-V2: 1; Megatron:
    moe_router_topk // moe_router_group_topk), of "softmax" without pre_softmax the largest logits.

    With `moe_router_enable_expert_bias` experts are chosen by score + `expert_bias` (float32 [E], saved), weights
    are made of scores alone; `end_step` moves it by `moe_router_bias_update_rate` towards experts with fewer rows
    than the mean (arXiv 2408.15664). With "global_aux_loss", `rows_of_last_step` (float32 [E], saved) are those of
    the global batch before.

    The choice is noted: a recomputed forward takes the first run's, so that near ties cannot route otherwise.
    """

    equal_buffers = ("expert_bias", "rows_of_last_step")  # on all ranks, by `end_step`

    expert_bias: Tensor | None
    rows_of_last_step: Tensor | None

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        assert config.num_moe_experts is not None
        experts = config.num_moe_experts
        self.top_k = config.moe_router_topk
        self.sigmoid = config.moe_router_score_function == "sigmoid"
        self.pre_softmax = config.moe_router_pre_softmax
        self.scaling = config.moe_router_topk_scaling_factor
        self.num_groups = config.moe_router_num_groups
        self.group_topk = config.moe_router_group_topk
        self.group_score_topk = config.moe_router_group_score_topk
        self.group = build.parallel.group("tp")
        layout = Layout((experts, config.hidden_size), partial=frozenset({"tp"}))
        self.weight = build.place.parameter(layout, Init(std=config.init_method_std))
        self.layer = build.layer
        self.bias_rate = config.moe_router_bias_update_rate
        is_global = config.moe_router_load_balancing_type == "global_aux_loss"
        device = build.place.device
        zeros = torch.zeros(experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", zeros if config.moe_router_enable_expert_bias else None)
        self.register_buffer("rows_of_last_step", zeros.clone() if is_global else None)
        moves = config.moe_router_enable_expert_bias and self.bias_rate > 0
        self.load = Load(experts, remembers=is_global or moves)
        Loads.of(build).routers.append(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """`model.bfloat16()` leaves the buffers in float32, where small steps add up; from meta they begin at 0."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            moved = self._buffers[name]
            assert moved is not None
            if old.is_meta and not moved.is_meta:
                self._buffers[name] = torch.zeros_like(moved, dtype=torch.float32)
            elif moved.dtype != old.dtype:
                self._buffers[name] = old.to(moved.device)
        return self

    def reset_parameters(self) -> None:
        """The buffers begin at 0; the weight's first values are the model's to draw. For a model that was on meta."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = torch.zeros_like(buffer, device=self.weight.device)

    def end_step(self, rows: Tensor) -> None:
        """rows: int64 [E], how many each expert got in the step, on all ranks together. A frozen router stays."""
        if self.expert_bias is not None and self.weight.requires_grad:
            # by its sign only, as in the paper: the step does not depend on how many tokens there are
            counts = rows.to(self.expert_bias.dtype)
            self.expert_bias.add_(torch.sign(counts.mean() - counts), alpha=self.bias_rate)
        if self.rows_of_last_step is not None:
            self.rows_of_last_step.copy_(rows)

    def forward(self, x: Tensor) -> Routing:
        """x [T, h] of this rank's tokens."""
        weight = self.weight if self.group is None else sum_gradient(self.weight, self.group)
        dtype = torch.promote_types(x.dtype, torch.float32)
        # scores in float32 under autocast, too: near ties would otherwise be decided by rounding
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                logits = F.linear(x.to(dtype), weight.to(dtype))
        else:
            logits = F.linear(x.to(dtype), weight.to(dtype))
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        (experts,) = note(lambda: (self._chosen(scores.detach(), logits.detach()),))
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

    @property
    def prefers_by_scores(self) -> bool:
        """Whether the experts of a token are those of its k largest scores: no groups, no bias."""
        return self.expert_bias is None and self.num_groups is None

    def _chosen(self, scores: Tensor, logits: Tensor) -> Tensor:
        """[T, E] -> int64 [T, k]."""
        if self.expert_bias is not None:
            preference = scores + self.expert_bias
        elif self.sigmoid or self.pre_softmax or self.num_groups is None:
            # softmax keeps the order of logits
            preference = scores
        else:
            # but not that of sums of some, of groups
            preference = logits
        if self.num_groups is not None and self.group_topk is not None:
            by_group = preference.unflatten(1, (self.num_groups, -1))
            counted = min(self.group_score_topk, by_group.shape[2])
            group_scores = by_group.topk(counted, dim=-1).values.sum(-1)
            best = group_scores.topk(self.group_topk, dim=-1, sorted=False).indices
            left_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
            preference = by_group.masked_fill(left_out[..., None], -torch.inf).flatten(1)
        return preference.topk(self.top_k, dim=-1).indices
