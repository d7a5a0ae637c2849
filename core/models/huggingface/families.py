"""Hugging Face's names and shapes for our parameters: Llama, Mistral, Qwen2, Qwen3 and GPT-2.

What we cannot represent is refused, and every tensor of the weights must find its place: wrong numbers would
look like a worse model, not like an error.

Nothing here imports transformers: configurations are read by attribute, weights come as a mapping of tensors.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.models.gpt.gpt_layer_specs import gpt2_spec, llama_spec
from core.models.gpt.gpt_model import GPTModel
from core.parallel_state import layout_of
from core.parallel_state.config import raise_all
from core.parallel_state.layout import true_part
from core.transformer.spec import TransformerLayerSpec
from core.transformer.transformer_config import TransformerConfig

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
# masks and rotary tables that older transformers stored beside the weights; we compute them
_BUFFERS = re.compile(r"(transformer\.h\.\d+\.attn\.(masked_)?bias|model\..*rotary_emb\.inv_freq)")
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

    Raises ValueError: a model type, or facts of the model that we cannot represent (all of them at once).
    """
    if hf.model_type == "gpt2":
        return _from_gpt2(hf, params_dtype)
    if hf.model_type not in LLAMA_LIKE:
        raise ValueError(f"model_type={hf.model_type!r} is not supported; known: gpt2, {', '.join(LLAMA_LIKE)}")
    raise_all("from_huggingface", _llama_rules(hf))
    rope: dict[str, Any] = getattr(hf, "rope_parameters", None) or {}
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
        add_bias_linear=_biases(hf) == (True, True),
        add_qkv_bias=hf.model_type == "qwen2",
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


def _biases(hf: Any) -> tuple[bool, bool]:
    """Whether (all four projections of the attention, the MLP) have biases; other model types ignore the flags."""
    attention = hf.model_type in ("llama", "qwen3") and bool(getattr(hf, "attention_bias", False))
    return attention, hf.model_type == "llama" and bool(getattr(hf, "mlp_bias", False))


def _llama_rules(hf: Any) -> Iterator[tuple[bool, str]]:
    for rope in (getattr(hf, name, None) or {} for name in ("rope_parameters", "rope_scaling")):
        kind = rope.get("rope_type", rope.get("type", "default"))
        yield kind == "default", f"rope_type={kind!r} is not supported; only unscaled rotary positions are"
    slides = getattr(hf, "use_sliding_window", hf.model_type == "mistral")
    window = getattr(hf, "sliding_window", None)
    yield not (slides and window), f"sliding_window={window} is not supported; set it to None"
    attention, mlp = _biases(hf)
    flags = f"attention_bias={attention}" + (f" with mlp_bias={mlp}" if hf.model_type == "llama" else "")
    remedy = "both True or both False" if hf.model_type == "llama" else "attention_bias=False"
    yield (
        attention == mlp,
        f"{flags} is not supported: here all linear layers of attention and MLP have a bias, or none has; "
        f"what can be represented is {remedy}",
    )


def _gpt2_rules(hf: Any) -> Iterator[tuple[bool, str]]:
    scaled, by_layer = getattr(hf, "scale_attn_weights", True), getattr(hf, "scale_attn_by_inverse_layer_idx", False)
    yield scaled, f"scale_attn_weights={scaled} is not supported: scores are scaled by 1/sqrt(head size); use True"
    yield (
        not by_layer,
        f"scale_attn_by_inverse_layer_idx={by_layer} is not supported: all layers scale scores alike; use False",
    )
    cross = getattr(hf, "add_cross_attention", False)
    yield not cross, f"add_cross_attention={cross} is not supported: there is no encoder to attend to; use False"
    yield (
        hf.embd_pdrop == hf.resid_pdrop,
        f"embd_pdrop={hf.embd_pdrop} with resid_pdrop={hf.resid_pdrop} is not supported: one hidden_dropout serves "
        "both; set them to the same value",
    )


def _from_gpt2(hf: Any, params_dtype: torch.dtype) -> HuggingFaceModel:
    raise_all("from_huggingface", _gpt2_rules(hf))
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


class _Source:
    """Tensors by name that remember which were asked for."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state, self.used = state, set[str]()

    def __contains__(self, name: str) -> bool:
        return name in self.state

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.state:
            raise ValueError(
                f"the Hugging Face weights lack {name}, which the configuration asks for; are both of one model?"
            )
        self.used.add(name)
        return self.state[name]

    def unused(self) -> list[str]:
        return [name for name in self.state if name not in self.used and not _BUFFERS.fullmatch(name)]


def canonical(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Whole tensors under Hugging Face's names -> whole tensors under ours, in our shapes.

    Weights, gradients and moments alike: every step is a reshape, a transposition or a concatenation.
    Raises ValueError: a tensor is missing, names without the prefix of a whole model, query, key and value of
    other sizes than the configuration's.
    """
    return _read(_Source(state), config)


def _read(source: _Source, config: TransformerConfig) -> dict[str, Tensor]:
    names = {"transformer.wte.weight": _gpt2_names, "model.embed_tokens.weight": _llama_names}
    for table, named in names.items():
        if table in source:
            return dict(named(source, config))
    for table in names:
        prefix, _, bare = table.partition(".")
        if bare in source:
            raise ValueError(
                f"the Hugging Face weights hold {bare} and no {table}: they are of the model without its head; pass "
                f"the state_dict of AutoModelForCausalLM, or put '{prefix}.' before the names"
            )
    raise ValueError(
        f"the Hugging Face weights hold none of {', '.join(names)}; their names begin with: "
        f"{', '.join(list(source.state)[:3]) or 'nothing, they are empty'}"
    )


def _fuse(q: Tensor, k: Tensor, v: Tensor, config: TransformerConfig) -> Tensor:
    """[a d, ...], [g d, ...], [g d, ...] -> [g, q+2, d, ...]."""
    rest, g, d = q.shape[1:], config.groups, config.head_size
    sizes = (config.num_attention_heads * d, g * d, g * d)
    if (found := (len(q), len(k), len(v))) != sizes:  # a reshape might fit and mix heads
        raise ValueError(f"query, key and value have {found} rows in the Hugging Face weights, expected {sizes}")
    return torch.cat((q.reshape(g, -1, d, *rest), k.reshape(g, 1, d, *rest), v.reshape(g, 1, d, *rest)), 1)


def _llama_names(state: _Source, config: TransformerConfig) -> Iterator[tuple[str, Tensor]]:
    yield "embedding.word_embeddings.weight", state["model.embed_tokens.weight"]
    yield "decoder.final_layernorm.weight", state["model.norm.weight"]
    if "lm_head.weight" in state:
        yield "output_layer.weight", state["lm_head.weight"]
    biases = ("weight", "bias") if config.add_bias_linear else ("weight",)
    for n in range(config.num_layers):
        theirs, ours = f"model.layers.{n}.", f"decoder.layers.{n}."
        yield f"{ours}input_layernorm.weight", state[f"{theirs}input_layernorm.weight"]
        yield f"{ours}pre_mlp_layernorm.weight", state[f"{theirs}post_attention_layernorm.weight"]
        attention = f"{theirs}self_attn."
        for kind in ("weight", "bias") if config.add_qkv_bias else biases:
            q, k, v = (state[f"{attention}{part}_proj.{kind}"] for part in "qkv")
            yield f"{ours}self_attention.linear_qkv.{kind}", _fuse(q, k, v, config)
        if config.qk_layernorm:
            yield f"{ours}self_attention.q_layernorm.weight", state[f"{attention}q_norm.weight"]
            yield f"{ours}self_attention.k_layernorm.weight", state[f"{attention}k_norm.weight"]
        for kind in biases:
            yield f"{ours}self_attention.linear_proj.{kind}", state[f"{attention}o_proj.{kind}"]
            gate, up = state[f"{theirs}mlp.gate_proj.{kind}"], state[f"{theirs}mlp.up_proj.{kind}"]
            yield f"{ours}mlp.linear_fc1.{kind}", torch.stack((gate, up))
            yield f"{ours}mlp.linear_fc2.{kind}", state[f"{theirs}mlp.down_proj.{kind}"]


def _gpt2_names(state: _Source, config: TransformerConfig) -> Iterator[tuple[str, Tensor]]:
    yield "embedding.word_embeddings.weight", state["transformer.wte.weight"]
    yield "embedding.position_embeddings.weight", state["transformer.wpe.weight"]
    if "lm_head.weight" in state:
        yield "output_layer.weight", state["lm_head.weight"]
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

    Raises ValueError: a parameter of the model that the weights lack, or one of another shape; a tensor of the
    weights that the model has no place for. The model is then partly filled, or not at all.
    """
    source = _Source(state)
    whole = _read(source, model.config)
    _check_all_used(model, source, whole)
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


def _check_all_used(model: GPTModel, source: _Source, whole: Mapping[str, Tensor]) -> None:
    """Every tensor was read; what was read for a part that this rank holds is a parameter of it; a tied head is one.

    (A pipeline stage holds some parts only, so that not every name of `whole` is a parameter here.)
    """
    ours = {name for name, _ in model.named_parameters()}
    held = {_part(name) for name in ours} | ({"embedding.position_embeddings"} if model.pre_process else set())
    dropped = source.unused() or [name for name in whole if name not in ours and _part(name) in held]
    if dropped:
        more = f" and {len(dropped) - 3} more" if len(dropped) > 3 else ""
        raise ValueError(
            f"{len(dropped)} of the Hugging Face weights have no place in the model: {', '.join(dropped[:3])}{more}; "
            "are the configuration and the weights of one model?"
        )
    table, head = whole["embedding.word_embeddings.weight"], whole.get("output_layer.weight")
    if model.tied and head is not None and not torch.equal(table, head):
        raise ValueError(
            "lm_head.weight differs from the embedding in the Hugging Face weights, but the model ties them; build "
            "it with share_embeddings_and_output_weights=False (tie_word_embeddings=False)"
        )


def _part(name: str) -> str:
    """The part of a model that a pipeline stage holds or not: a layer, or a module outside of the layers."""
    layer = re.match(r"decoder\.layers\.\d+", name)
    return layer[0] if layer else name.rpartition(".")[0]
