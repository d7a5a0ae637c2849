"""Rules of a configuration with experts: functions of its fields."""

from collections.abc import Iterator
from math import inf
from typing import Any

from core.parallel_state.config import divisors

SCORE_FUNCTIONS = ("softmax", "sigmoid")
BALANCING_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


# a TransformerConfig, whose file imports this one
ExpertFacts = Any


def moe_rules(config: ExpertFacts) -> Iterator[tuple[bool, str]]:
    """(holds, message) for every fact about experts."""
    experts = config.num_moe_experts
    top_k = config.moe_router_topk
    if experts is None:
        yield (
            config.moe_shared_expert_intermediate_size is None,
            f"moe_shared_expert_intermediate_size={config.moe_shared_expert_intermediate_size} without "
            "num_moe_experts; give that too",
        )
        return
    yield experts >= 1, f"num_moe_experts={experts} must be at least 1"
    yield (
        1 <= top_k <= experts,
        f"moe_router_topk={top_k} must lie between 1 and num_moe_experts={experts}",
    )
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        size = getattr(config, name)
        yield size is None or size >= 1, f"{name}={size} must be at least 1"
    yield (
        config.moe_router_score_function in SCORE_FUNCTIONS,
        f"unknown moe_router_score_function {config.moe_router_score_function!r}; known: "
        f"{', '.join(SCORE_FUNCTIONS)}",
    )
    yield (
        config.moe_router_load_balancing_type in BALANCING_TYPES,
        f"unknown moe_router_load_balancing_type {config.moe_router_load_balancing_type!r}; known: "
        f"{', '.join(BALANCING_TYPES)}",
    )
    is_constant = (
        top_k == 1
        and config.moe_router_score_function == "softmax"
        and not config.moe_router_pre_softmax
    )
    yield (
        not is_constant or experts == 1,
        "moe_router_topk=1 with a softmax over the 1 chosen expert is 1: the router would have no gradient; set "
        "moe_router_pre_softmax",
    )
    for name in (
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_topk_scaling_factor",
        "moe_router_bias_update_rate",
    ):
        value = getattr(config, name)
        yield value is None or 0 <= value < inf, f"{name}={value} must not be negative, and finite"
    yield (
        not config.add_bias_linear,
        "experts have no biases; set add_bias_linear=False",
    )
    yield from _group_rules(config, experts)
    yield from _layer_rules(config)


def no_capacity(factor: float | None) -> tuple[bool, str]:
    """(holds, message) for Megatron's `moe_expert_capacity_factor`."""
    return (
        factor is None,
        f"moe_expert_capacity_factor={factor}: experts have no capacity here, each computes all rows that come to it "
        "and no token is dropped; leave it out, and keep experts even with moe_aux_loss_coeff or "
        "moe_router_enable_expert_bias",
    )


def _group_rules(config: ExpertFacts, experts: int) -> Iterator[tuple[bool, str]]:
    groups = config.moe_router_num_groups
    best = config.moe_router_group_topk
    yield (
        (groups is None) == (best is None),
        f"moe_router_num_groups={groups} and moe_router_group_topk={best} belong together; give both",
    )
    if groups is None or best is None:
        return
    yield (
        groups >= 1 and experts % max(groups, 1) == 0,
        f"num_moe_experts={experts} does not divide into moe_router_num_groups={groups}; valid: "
        f"{', '.join(map(str, divisors(experts)))}",
    )
    yield (
        1 <= best <= groups,
        f"moe_router_group_topk={best} must lie between 1 and moe_router_num_groups={groups}",
    )
    counted = config.moe_router_group_score_topk
    yield counted >= 1, f"moe_router_group_score_topk={counted} must be at least 1"
    experts_left = best * experts // max(groups, 1)
    yield (
        config.moe_router_topk <= experts_left,
        f"moe_router_topk={config.moe_router_topk} experts of a token, but {best} of {groups} groups leave "
        f"{experts_left}; use fewer experts, or more groups of them",
    )


def _layer_rules(config: ExpertFacts) -> Iterator[tuple[bool, str]]:
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        yield frequency >= 1, f"moe_layer_freq={frequency} must be at least 1"
        return
    yield (
        len(frequency) == config.num_layers,
        f"moe_layer_freq names {len(frequency)} layers, num_layers={config.num_layers}; give 1 or 0 for each",
    )
    others = sorted(set(frequency) - {0, 1})
    yield not others, f"moe_layer_freq holds {others[:1]}; 1 is a layer with experts, 0 one without"
    yield (
        any(frequency),
        f"moe_layer_freq={frequency} gives experts to none of num_layers={config.num_layers} layers, with "
        f"num_moe_experts={config.num_moe_experts}; leave that out, or name a layer",
    )
