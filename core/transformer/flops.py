"""What a model multiplies, for throughput and for an even cut into pipeline stages."""

from core.transformer.transformer_config import TransformerConfig


def multiplications_per_token(
    config: TransformerConfig, vocab_size: int, sequence_length: int
) -> tuple[list[int], int]:
    """(of each layer, of the output layer) in one forward, matrix products only; of experts those that a token uses.

    Causal attention counts half its square, what a causal kernel computes; a figure that counts all of it is larger.
    """
    h = config.hidden_size
    d = config.head_size
    heads = config.num_attention_heads
    groups = config.groups
    projections = h * d * (2 * heads + 2 * groups)
    layers = []
    for layer in range(config.num_layers):
        # a query meets sequence_length / 2 keys on average, in the scores and again in the values
        keys = _mean_visible_keys(
            sequence_length, config.windows[layer] if config.windows else None
        )
        scores_and_values = round(2 * keys * heads * d)
        layers.append(projections + scores_and_values + _feed_forward(config, layer))
    return layers, h * vocab_size


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
