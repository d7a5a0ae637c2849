"""Rules of a configuration with multi-head latent attention: functions of its fields."""

from collections.abc import Iterator
from typing import Any

# where a configuration does not say; Megatron's
LATENT_SIZES = {
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
_OF_LATENTS = ("q_lora_rank", *LATENT_SIZES, "latent_layernorm_epsilon")

# a TransformerConfig, whose file imports this one
LatentFacts = Any


def latent_rules(config: LatentFacts) -> Iterator[tuple[bool, str]]:
    """(holds, message) for every fact about latent attention."""
    if not config.multi_latent_attention:
        yield from _without(config)
        return
    for name in ("q_lora_rank", *LATENT_SIZES):
        size = getattr(config, name)
        yield size is None or size >= 1, f"{name}={size} must be at least 1"
    epsilon = config.latent_layernorm_epsilon
    yield (
        epsilon is None or epsilon > 0,
        f"latent_layernorm_epsilon={epsilon} must be positive",
    )
    rotated = config.qk_pos_emb_head_dim
    yield (
        rotated % 2 == 0,
        f"qk_pos_emb_head_dim={rotated} is odd, rotary positions turn pairs of dims; use {rotated + 1}",
    )
    heads = config.num_attention_heads
    groups = config.num_query_groups
    yield (
        groups == heads,
        f"num_query_groups={groups} with multi_latent_attention: each of num_attention_heads={heads} heads has a key "
        "and a value of its own, made of one latent; leave num_query_groups out",
    )
    size = config.qk_head_dim + rotated
    yield (
        config.kv_channels == size,
        f"kv_channels={config.kv_channels} with multi_latent_attention, whose heads are qk_head_dim="
        f"{config.qk_head_dim} + qk_pos_emb_head_dim={rotated} = {size}; leave kv_channels out",
    )
    percents = [config.rotary_percent]
    percents += [one.percent for one in config.rotary_per_layer or () if one is not None]
    yield (
        set(percents) == {1.0},
        f"rotary_percent={min(percents)} with multi_latent_attention: the part that rotates is qk_pos_emb_head_dim="
        f"{rotated} of {size}; use rotary_percent=1 and another qk_pos_emb_head_dim",
    )
    yield (
        not config.add_qkv_bias,
        "add_qkv_bias=True with multi_latent_attention, whose 4 projections of queries, keys and values have no "
        "biases; leave it out",
    )


def _without(config: LatentFacts) -> Iterator[tuple[bool, str]]:
    for name in _OF_LATENTS:
        value = getattr(config, name)
        yield (
            value is None,
            f"{name}={value} without multi_latent_attention; set that too, or leave {name} out",
        )
    yield (
        not config.rotary_interleaved,
        "rotary_interleaved=True without multi_latent_attention: other attention turns numbers that are half a head "
        "apart; use False, with the rows of each query and key head of a weight in that order",
    )
