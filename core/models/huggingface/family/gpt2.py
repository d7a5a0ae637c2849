"""GPT-2: learned positions, LayerNorm, biases everywhere."""

import torch

from core.models.gpt.gpt_layer_specs import gpt2_spec
from core.models.huggingface.facts import Facts
from core.models.huggingface.family.family import (
    ACTIVATIONS,
    Fields,
    HuggingFaceModel,
    Rules,
    activation_name,
    one_dropout,
)
from core.transformer.transformer_config import TransformerConfig


def gpt2_rules(facts: Facts) -> Rules:
    """What GPT-2's configuration may say that is not here."""
    scaled = facts.get("scale_attn_weights", True)
    by_layer = facts.get("scale_attn_by_inverse_layer_idx", False)
    yield (
        scaled,
        f"scale_attn_weights={scaled} is not supported: scores are scaled by 1/sqrt(head size); use True",
    )
    yield (
        not by_layer,
        f"scale_attn_by_inverse_layer_idx={by_layer} is not supported: all layers scale scores alike; use False",
    )
    cross = facts.get("add_cross_attention", False)
    yield (
        not cross,
        f"add_cross_attention={cross} is not supported: there is no encoder to attend to; use False",
    )
    yield from one_dropout(facts, default=0.1)


def gpt2_model(facts: Facts, params_dtype: torch.dtype) -> HuggingFaceModel:
    """Our form of GPT-2's fields."""
    activation = facts.get("activation_function", "gelu_new")
    config = TransformerConfig(
        num_layers=facts["n_layer"],
        hidden_size=facts["n_embd"],
        num_attention_heads=facts["n_head"],
        ffn_hidden_size=facts.get("n_inner") or 4 * facts["n_embd"],
        layernorm_epsilon=facts.get("layer_norm_epsilon", 1e-5),
        activation_func=ACTIVATIONS.get(activation, activation),
        hidden_dropout=facts.get("resid_pdrop", 0.1),
        attention_dropout=facts.get("attn_pdrop", 0.1),
        init_method_std=facts.get("initializer_range", 0.02),
        params_dtype=params_dtype,
    )
    return HuggingFaceModel(
        config=config,
        transformer_layer_spec=gpt2_spec(),
        vocab_size=facts["vocab_size"],
        max_sequence_length=facts["n_positions"],
        share_embeddings_and_output_weights=facts.get("tie_word_embeddings", True),
    )


def gpt2_fields(model: HuggingFaceModel) -> Fields:
    """What GPT-2 would say of a model of ours."""
    config = model.config
    return {
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn,
        "n_positions": model.max_sequence_length,
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "activation_function": activation_name(config),
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
    }
