"""A small GPT and its batch, for the tests of the model."""

import torch

from core.models.gpt import GPTModel, gpt2_spec, llama_spec
from core.transformer import TransformerConfig

VOCAB, S, B, POSITIONS = 101, 8, 2, 16
STYLES = {
    "gpt2": ({}, gpt2_spec),
    "llama": (
        {
            "normalization": "RMSNorm",
            "activation_func": "silu",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "num_query_groups": 4,
            "qk_layernorm": True,
        },
        llama_spec,
    ),
}


def config(style="gpt2", *, dropout=0.0, **more):
    facts = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "ffn_hidden_size": 40}
    facts |= {"hidden_dropout": dropout, "attention_dropout": dropout, "params_dtype": torch.float64}
    # large weights: with 0.02 every logit is near 0, and a mistake would be near 0 too
    return TransformerConfig(**facts | {"init_method_std": 0.3} | STYLES[style][0] | more)


def gpt(style="gpt2", *, parallel=None, tied=False, facts=None, spec=None, **more):
    """`facts`: of the config; the rest is for GPTModel."""
    return GPTModel(
        config(style, **facts or {}),
        spec or STYLES[style][1](),
        VOCAB,
        POSITIONS,
        parallel=parallel,
        share_embeddings_and_output_weights=tied,
        **more,
    )


def batch(seed=0, s=S, b=B):
    """tokens and labels [b, s], the last id of the vocabulary among them, one label ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCAB, (2, b, s), generator=generator)
    tokens[0, 0] = labels[0, 1] = VOCAB - 1
    labels[-1, 2] = -100
    return tokens, labels
