"""Hugging Face's names and shapes for our parameters: Llama, Mistral, Qwen2, Qwen3 and GPT-2.

Nothing here imports transformers: configurations are read by attribute, weights come as a mapping of tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.models.gpt.gpt_layer_specs import gpt2_spec, llama_spec
from core.models.gpt.gpt_model import GPTModel
from core.parallel_state import layout_of
from core.parallel_state.layout import true_part
from core.transformer.spec import TransformerLayerSpec
from core.transformer.transformer_config import TransformerConfig

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """What GPTModel(**) needs to be the same model: config, spec, sizes, tying."""

    config: TransformerConfig
    transformer_layer_spec: TransformerLayerSpec
    vocab_size: int
    max_sequence_length: int
    share_embeddings_and_output_weights: bool

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of GPTModel."""
        return dict(vars(self))


def from_huggingface(hf: Any, *, params_dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    """Our form of a transformers configuration object.

    Raises ValueError: a model type, rope scaling or sliding window that we cannot represent.
    """
    if hf.model_type == "gpt2":
        return _from_gpt2(hf, params_dtype)
    if hf.model_type not in LLAMA_LIKE:
        raise ValueError(f"model_type={hf.model_type!r} is not supported; known: gpt2, {', '.join(LLAMA_LIKE)}")
    rope: dict[str, Any] = getattr(hf, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default" or getattr(hf, "rope_scaling", None) not in (None, rope):
        raise ValueError(f"rope_type={kind!r} is not supported; only unscaled rotary positions are")
    if getattr(hf, "use_sliding_window", hf.model_type == "mistral") and getattr(hf, "sliding_window", None):
        raise ValueError(f"sliding_window={hf.sliding_window} is not supported; set it to None")
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        ffn_hidden_size=hf.intermediate_size,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.model_type == "qwen3",
        activation_func=_ACTIVATIONS.get(hf.hidden_act, hf.hidden_act),
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2" or bool(getattr(hf, "attention_bias", False)),
        hidden_dropout=0.0,
        attention_dropout=hf.attention_dropout,
        rotary_base=rope["rope_theta"] if "rope_theta" in rope else getattr(hf, "rope_theta", 10000.0),
        init_method_std=hf.initializer_range,
        params_dtype=params_dtype,
    )
    return HuggingFaceModel(
        config=config,
        transformer_layer_spec=llama_spec(),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
    )


def _from_gpt2(hf: Any, params_dtype: torch.dtype) -> HuggingFaceModel:
    config = TransformerConfig(
        num_layers=hf.n_layer,
        hidden_size=hf.n_embd,
        num_attention_heads=hf.n_head,
        ffn_hidden_size=hf.n_inner or 4 * hf.n_embd,
        layernorm_epsilon=hf.layer_norm_epsilon,
        activation_func=_ACTIVATIONS.get(hf.activation_function, hf.activation_function),
        hidden_dropout=hf.resid_pdrop,
        attention_dropout=hf.attn_pdrop,
        init_method_std=hf.initializer_range,
        params_dtype=params_dtype,
    )
    return HuggingFaceModel(
        config=config,
        transformer_layer_spec=gpt2_spec(),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.n_positions,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
    )


def canonical(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Whole tensors under Hugging Face's names -> whole tensors under ours, in our shapes.

    Weights, gradients and moments alike: every step is a reshape, a transposition or a concatenation.
    """
    named = _gpt2_names if "transformer.wte.weight" in state else _llama_names
    return dict(named(state, config))


def _fuse(q: Tensor, k: Tensor, v: Tensor, config: TransformerConfig) -> Tensor:
    """[a d, ...], [g d, ...], [g d, ...] -> [g, q+2, d, ...]."""
    rest, g, d = q.shape[1:], config.groups, config.head_size
    return torch.cat((q.reshape(g, -1, d, *rest), k.reshape(g, 1, d, *rest), v.reshape(g, 1, d, *rest)), 1)


def _llama_names(state: Mapping[str, Tensor], config: TransformerConfig) -> Iterator[tuple[str, Tensor]]:
    yield "embedding.word_embeddings.weight", state["model.embed_tokens.weight"]
    yield "decoder.final_layernorm.weight", state["model.norm.weight"]
    if "lm_head.weight" in state:
        yield "output_layer.weight", state["lm_head.weight"]
    for n in range(config.num_layers):
        theirs, ours = f"model.layers.{n}.", f"decoder.layers.{n}."
        yield f"{ours}input_layernorm.weight", state[f"{theirs}input_layernorm.weight"]
        yield f"{ours}pre_mlp_layernorm.weight", state[f"{theirs}post_attention_layernorm.weight"]
        attention = f"{theirs}self_attn."
        for kind in ("weight", "bias"):
            if f"{attention}q_proj.{kind}" in state:
                q, k, v = (state[f"{attention}{part}_proj.{kind}"] for part in "qkv")
                yield f"{ours}self_attention.linear_qkv.{kind}", _fuse(q, k, v, config)
        yield f"{ours}self_attention.linear_proj.weight", state[f"{attention}o_proj.weight"]
        if config.qk_layernorm:
            yield f"{ours}self_attention.q_layernorm.weight", state[f"{attention}q_norm.weight"]
            yield f"{ours}self_attention.k_layernorm.weight", state[f"{attention}k_norm.weight"]
        gate, up = state[f"{theirs}mlp.gate_proj.weight"], state[f"{theirs}mlp.up_proj.weight"]
        yield f"{ours}mlp.linear_fc1.weight", torch.stack((gate, up))
        yield f"{ours}mlp.linear_fc2.weight", state[f"{theirs}mlp.down_proj.weight"]


def _gpt2_names(state: Mapping[str, Tensor], config: TransformerConfig) -> Iterator[tuple[str, Tensor]]:
    yield "embedding.word_embeddings.weight", state["transformer.wte.weight"]
    yield "embedding.position_embeddings.weight", state["transformer.wpe.weight"]
    for kind in ("weight", "bias"):
        yield f"decoder.final_layernorm.{kind}", state[f"transformer.ln_f.{kind}"]
        for n in range(config.num_layers):
            theirs, ours = f"transformer.h.{n}.", f"decoder.layers.{n}."
            yield f"{ours}input_layernorm.{kind}", state[f"{theirs}ln_1.{kind}"]
            yield f"{ours}pre_mlp_layernorm.{kind}", state[f"{theirs}ln_2.{kind}"]
            q, k, v = state[f"{theirs}attn.c_attn.{kind}"].t().chunk(3)  # Conv1D keeps [in, out]
            yield f"{ours}self_attention.linear_qkv.{kind}", _fuse(q, k, v, config)
            yield f"{ours}self_attention.linear_proj.{kind}", state[f"{theirs}attn.c_proj.{kind}"].t()
            yield f"{ours}mlp.linear_fc1.{kind}", state[f"{theirs}mlp.c_fc.{kind}"].t()
            yield f"{ours}mlp.linear_fc2.{kind}", state[f"{theirs}mlp.c_proj.{kind}"].t()


@torch.no_grad()
def load_huggingface(model: GPTModel, state: Mapping[str, Tensor]) -> None:
    """Fill this rank's part of `model` from whole Hugging Face weights; each rank takes its own slices.

    Raises ValueError: a parameter of the model that the weights lack, or one of another shape.
    """
    whole = canonical(state, model.config)
    ps = model.parallel
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        if name not in whole:
            raise ValueError(f"the Hugging Face weights have no counterpart of {name}; is the model type right?")
        if tuple(whole[name].shape) != layout.shape:
            raise ValueError(
                f"{name} is {layout.shape} here and {tuple(whole[name].shape)} in the Hugging Face weights"
            )
        true_part(parameter, layout, ps.coordinate, ps.sizes).copy_(whole[name][layout.box(ps.coordinate, ps.sizes)])
