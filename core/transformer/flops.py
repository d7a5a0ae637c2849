"""What a model multiplies, for throughput and for an even cut into pipeline stages."""

from core.transformer.transformer_config import TransformerConfig


def multiplications_per_token(
    config: TransformerConfig, vocab_size: int, sequence_length: int
) -> tuple[list[int], int]:
    """(of each layer, of the output layer) in one forward, matrix products only; of experts those that a token uses.

    Causal attention counts half its square, what a causal kernel computes; a figure that counts all of it is larger.
    """
    h = config.hidden_size
    heads = config.num_attention_heads
    projections = _projections(config)
    layers = []
    for layer in range(config.num_layers):
        # a query meets sequence_length / 2 keys on average, in the scores and again in the values
        keys = _mean_visible_keys(
            sequence_length, config.windows[layer] if config.windows else None
        )
        scores_and_values = round(keys * heads * (config.head_size + config.value_size))
        layers.append(projections + scores_and_values + _feed_forward(config, layer))
    return layers, h * vocab_size


def _projections(config: TransformerConfig) -> int:
    """Queries, keys, values and the output; of latent attention down to the latents and up to the heads."""
    h = config.hidden_size
    heads = config.num_attention_heads
    if not config.multi_latent_attention:
        return h * config.head_size * (2 * heads + 2 * config.groups)
    q_rank = config.q_lora_rank
    kv_rank = config.kv_lora_rank
    rotated = config.qk_pos_emb_head_dim
    not_rotated = config.qk_head_dim
    assert kv_rank is not None and rotated is not None and not_rotated is not None
    if q_rank is None:
        queries = h * heads * config.head_size
    else:
        queries = q_rank * (h + heads * config.head_size)
    down = h * (kv_rank + rotated)
    up = kv_rank * heads * (not_rotated + config.value_size)
    return queries + down + up + heads * config.value_size * h


def _feed_forward(config: TransformerConfig, layer: int) -> int:
    h = config.hidden_size
    if config.gated_linear_unit:
        products = 3
    else:
        products = 2
    if not config.has_experts(layer):
        return h * config.ffn * products
    assert config.num_moe_experts is not None
    width = config.moe_router_topk * config.moe_ffn + (
        config.moe_shared_expert_intermediate_size or 0
    )
    # the last is the router
    return h * (width * products + config.num_moe_experts)


def _mean_visible_keys(sequence_length: int, window: int | None) -> float:
    """Keys that a query sees, on average over the sequence; with a window the first queries see fewer."""
    if window is None or window >= sequence_length:
        return sequence_length / 2
    # the diagonal counts half, as it does in a causal kernel's half of the square
    return window - 0.5 - window * (window - 1) / (2 * sequence_length)
