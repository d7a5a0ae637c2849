"""What a model multiplies, for throughput and for an even cut into pipeline stages."""

from core.transformer.transformer_config import TransformerConfig


def multiplications_per_token(config: TransformerConfig, vocab_size: int, sequence_length: int) -> tuple[int, int]:
    """(of one layer, of the output layer) in one forward, matrix products only.

    Causal attention counts half its square, what a causal kernel computes; a figure that counts all of it is larger.
    """
    h, d, heads, groups = config.hidden_size, config.head_size, config.num_attention_heads, config.groups
    projections = h * d * (2 * heads + 2 * groups)
    scores_and_values = sequence_length * heads * d
    mlp = h * config.ffn * (3 if config.gated_linear_unit else 2)
    return projections + scores_and_values + mlp, h * vocab_size
