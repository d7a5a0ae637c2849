"""What a model multiplies, for throughput and for an even cut into pipeline stages."""

from core.transformer.transformer_config import TransformerConfig


def multiplications_per_token(config: TransformerConfig, vocab_size: int, sequence_length: int) -> tuple[int, int]:
    """(of one layer, of the output layer) in one forward, matrix products only; windows averaged over layers.

    Causal attention counts half its square, what a causal kernel computes; a figure that counts all of it is larger.
    """
    h, d, heads, groups = config.hidden_size, config.head_size, config.num_attention_heads, config.groups
    projections = h * d * (2 * heads + 2 * groups)
    # a query meets sequence_length / 2 keys on average, in the scores and again in the values
    keys = sum(_visible(sequence_length, window) for window in config.windows or (None,))
    scores_and_values = round(2 * keys / len(config.windows or (None,)) * heads * d)
    mlp = h * config.ffn * (3 if config.gated_linear_unit else 2)
    return projections + scores_and_values + mlp, h * vocab_size


def _visible(sequence_length: int, window: int | None) -> float:
    """Keys that a query sees, on average over the sequence; with a window the first queries see fewer."""
    if window is None or window >= sequence_length:
        return sequence_length / 2
    # the diagonal counts half, as it does in a causal kernel's half of the square
    return window - 0.5 - window * (window - 1) / (2 * sequence_length)
