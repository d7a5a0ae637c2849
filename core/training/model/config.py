"""The settings of a model: a preset, a Hugging Face folder or a style, and every fact of it, in plain values."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from core.field_names import tells_names
from core.parallel_state.config import raise_all
from core.training.model import facts as model_facts
from core.training.model.facts import POSITIONS
from core.transformer.precision import FP8_FIELDS
from core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from core.models.huggingface import HuggingFaceModel
    from core.transformer.spec import TransformerLayerSpec

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@tells_names("model")
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model: a preset, a Hugging Face folder, or a style with sizes; `transformer()` spells it out.

    A field that is None is the preset's or the folder's, else that of a small Llama. Fields given beside a preset
    change it; beside a folder they are refused, but for dropout.
    Raises ValueError: an unknown name, fields that contradict each other.
    """

    preset: str | None = None
    """A published model's sizes: llama-60m, -160m, -1b, -8b, -70b, qwen3-0.6b, -8b, gpt2-124m, -1.5b."""

    huggingface: str | None = None
    """A folder of Hugging Face's: the model's facts, vocabulary, tokenizer and first weights come from there. A run
    that resumes reads its checkpoint's weights instead."""

    build: str | None = None
    """A model of your own, "package.module:function": function(run, vocab_size, parallel) returns an nn.Module, or
    {stage: nn.Module} of this rank. It takes tokens and labels and returns losses [b, s]; the other fields here are
    for it to read."""

    style: Literal["llama", "gpt2"] | None = None
    """llama (the default): RMSNorm, rotary positions, gated SiLU, no biases. gpt2: LayerNorm, learned positions,
    GELU, biases."""

    num_layers: int | None = None
    """Transformer layers of the whole model, before they are divided into pipeline stages; default: 4."""

    hidden_size: int | None = None
    """Elements of the residual stream per token; a multiple of num_attention_heads unless kv_channels is given;
    default: 192."""

    num_attention_heads: int | None = None
    """Query heads of a layer; a multiple of parallel.tensor; default: 8."""

    num_query_groups: int | None = None
    """Key and value heads of a layer, each shared by as many query heads; default: one per query head."""

    kv_channels: int | None = None
    """Elements of one head; default: hidden_size / num_attention_heads."""

    ffn_hidden_size: int | None = None
    """Elements between the two products of the MLP, of gate and up each where it is gated; default: 512."""

    normalization: Literal["LayerNorm", "RMSNorm"] | None = None
    """Of every layer; default: the style's."""

    layernorm_epsilon: float | None = None
    """Added to the variance (LayerNorm) or mean square (RMSNorm); default: 1e-5."""

    layernorm_zero_centered_gamma: bool | None = None
    """Norms multiply by 1 + weight, as Gemma's; default: false."""

    qk_layernorm: bool | None = None
    """Each query and key head is normalised, as in Qwen3; default: false."""

    activation_func: str | None = None
    """gelu, gelu_tanh, silu, relu ...; default: the style's."""

    gated_linear_unit: bool | None = None
    """The MLP multiplies its activation with a second product (SwiGLU, GeGLU); default: the style's."""

    add_bias_linear: bool | None = None
    """All linear layers have biases; default: the style's."""

    add_qkv_bias: bool | None = None
    """Query, key and value have biases even without add_bias_linear, as in Qwen2; default: false."""

    dropout: float | None = None
    """Share of elements that dropout zeroes, in the residual stream and in attention; default: 0, drops nothing."""

    hidden_dropout: float | None = None
    """The same, of the residual stream alone; default: dropout."""

    attention_dropout: float | None = None
    """The same, of attention alone; default: dropout."""

    position_embedding_type: Literal["rope", "learned_absolute", "none"] | None = None
    """rope: rotary; learned_absolute: a table that is added; none; default: the style's."""

    max_position_embeddings: int | None = None
    """Positions that the model has; default: data.sequence_length."""

    rotary_base: float | None = None
    """Base of the rotary frequencies (rope_theta); default: 10000."""

    rotary_percent: float | None = None
    """Share of a head's dims that is rotated; default: 1."""

    rotary_scaling: dict[str, str | float] = field(default_factory=dict)
    """How the rotary frequencies were changed for longer texts, {kind = "llama3", factor = 8.0, ...}, {kind =
    "linear", factor = 2.0}, {kind = "yarn", factor = 40.0, ...}, or {kind = "none"} beside a preset that has one;
    default: the preset's, or none."""

    softmax_scale: float | None = None
    """What attention's scores are multiplied by before their softmax; default: 1 / sqrt(kv_channels), times what a
    rotary_scaling of kind yarn asks for."""

    multi_latent_attention: bool | None = None
    """Keys and values of all heads are made of one small vector per token (MLA: DeepSeek-V2 and -V3); with
    qk_layernorm the small vectors are normalised. Default: false."""

    q_lora_rank: int | None = None
    """Elements of the small vector that queries are made of; default: queries are made without one."""

    kv_lora_rank: int | None = None
    """Elements of the one that keys and values are made of; default with multi_latent_attention: 512."""

    qk_head_dim: int | None = None
    """Elements of a query and key head that do not rotate; default with multi_latent_attention: 128."""

    qk_pos_emb_head_dim: int | None = None
    """Elements of a query and key head that rotate, of keys the same for all heads; default so: 64."""

    v_head_dim: int | None = None
    """Elements of a value head; default with multi_latent_attention: 128."""

    latent_layernorm_epsilon: float | None = None
    """That of the norms of the small vectors; default: layernorm_epsilon."""

    rotary_interleaved: bool | None = None
    """With multi_latent_attention: neighbouring elements turn together, not those half apart; default: false."""

    embedding_multiplier: float | None = None
    """What token embeddings are multiplied by; default: 1."""

    windows: tuple[str, ...] = ()
    """Tokens that a token sees, itself included: one number for all layers, or a list that repeats over the layers,
    in which "None" is a layer that sees everything; empty: all layers do."""

    num_moe_experts: int | None = None
    """Experts of a layer, in the place of its MLP; default: none."""

    moe_layer_freq: tuple[str, ...] = ()
    """Which layers have experts: one number n is every n-th from the first, a list has 1 or 0 for each layer;
    default: all layers."""

    moe_router_topk: int | None = None
    """Experts that a token uses; default: 2."""

    moe_ffn_hidden_size: int | None = None
    """Elements between the products of one expert; default: ffn_hidden_size."""

    moe_shared_expert_intermediate_size: int | None = None
    """The same of an MLP that every token uses beside its experts; default: there is none."""

    moe_router_score_function: Literal["softmax", "sigmoid"] | None = None
    """softmax (Mixtral, Qwen3-MoE) or sigmoid (DeepSeek-V3) of the router's logits; default: softmax."""

    moe_router_pre_softmax: bool | None = None
    """Softmax over all experts before the choice, not over the chosen ones; default: false."""

    moe_router_topk_scaling_factor: float | None = None
    """What the weights of a token's experts are multiplied by; default: 1."""

    moe_router_num_groups: int | None = None
    """Groups of experts, of which only the best are chosen from; default: no groups."""

    moe_router_group_topk: int | None = None
    """How many groups are chosen from."""

    moe_router_group_score_topk: int | None = None
    """By the sum of so many of their best experts' scores (DeepSeek-V3: 2, DeepSeek-V2: 1); default: 2."""

    moe_router_enable_expert_bias: bool | None = None
    """A bias per expert chooses, and moves after each step towards experts that few tokens use; default: false."""

    moe_router_bias_update_rate: float | None = None
    """By how much it moves; default: 0.001."""

    moe_router_load_balancing_type: (
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"] | None
    ) = None
    """Over what experts should be used alike: the microbatch, each sequence, the global batch before, nothing;
    default: aux_loss."""

    moe_aux_loss_coeff: float | None = None
    """Weight of the loss for that, per layer and token; default: 0. 0.01 is usual."""

    moe_z_loss_coeff: float | None = None
    """Weight of a loss that keeps the router's logits small; default: 0. 0.001 is usual."""

    init_method_std: float | None = None
    """Standard deviation of the initial weights; default: 0.02."""

    use_cpu_initialization: bool = True
    """Initial weights are drawn on the CPU, the same for every device type; false: faster, on the device."""

    vocab_size: int | None = None
    """Rows of the embedding, at least the tokenizer's tokens; default: those."""

    tie_embeddings: bool | None = None
    """The output layer uses the table of the token embeddings; default: true."""

    bf16: bool = False
    """Weights and activations in bfloat16, with float32 copies in the optimizer (optimizer.main_params)."""

    fp16: bool = False
    """Weights and activations in float16, with a loss scale that follows overflows."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """The products of the layers' linears, and of their gradients, in 8 bits: e4m3, or hybrid, with e5m2 for output
    gradients. Weights, checkpoints and all else stay as without it; default: none in 8 bits."""

    fp8_recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """One scale for each factor of a product, or one for each of its rows; from the largest value there now."""

    fp8_wgrad: bool = True
    """Weight gradients are 8-bit products, too; false: of the model's dtype."""

    first_last_layers_bf16: bool = False
    """The first and last layers, as many as the two fields below say, stay in the model's dtype."""

    num_layers_at_start_in_bf16: int = 1
    """How many at the start."""

    num_layers_at_end_in_bf16: int = 1
    """How many at the end."""

    seed: int = 1234
    """Seed of the initial weights; they do not depend on the layout of ranks."""

    def __post_init__(self) -> None:
        raise_all("ModelConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield (
            not (self.bf16 and self.fp16),
            "bf16 and fp16 are 2 dtypes for one model; give one of them",
        )
        yield from model_facts.rules(vars(self))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        if self.bf16:
            return torch.bfloat16
        if self.fp16:
            return torch.float16
        return torch.float32

    @property
    def _fp8(self) -> dict[str, Any]:
        """The fields about 8 bits, which go beside a folder, too: they are no facts of a model."""
        return {name: getattr(self, name) for name in FP8_FIELDS}

    @cached_property
    def _folder(self) -> "HuggingFaceModel | None":
        """What `huggingface` says. Raises ValueError: a folder without a model that is known here."""
        if self.huggingface is None:
            return None
        from core.models.huggingface import from_huggingface

        try:
            return from_huggingface(self.huggingface, params_dtype=self.dtype)
        except ValueError as error:
            raise ValueError(f"model.huggingface={self.huggingface}: {error}") from error

    def transformer(self) -> TransformerConfig:
        """The model's TransformerConfig. Raises ValueError with every mistake."""
        if self._folder is not None:
            beside = model_facts.given_beside_folder(vars(self))
            return replace(self._folder.config, **self._fp8, **beside)
        return TransformerConfig(
            **model_facts.transformer_arguments(vars(self)), params_dtype=self.dtype, **self._fp8
        )

    def with_defaults(self) -> "ModelConfig":
        """With every fact that a preset, the style or a small Llama says, where nobody gave it."""
        facts = model_facts.plain(vars(self))
        missing = {name: value for name, value in facts.items() if getattr(self, name) is None}
        return replace(self, **missing)

    @property
    def layers(self) -> int:
        """Transformer layers of the whole model."""
        if self._folder is not None:
            return self._folder.config.num_layers
        return int(model_facts.plain(vars(self))["num_layers"])

    def spec(self) -> "TransformerLayerSpec":
        """The modules of its layers."""
        if self._folder is not None:
            return self._folder.transformer_layer_spec
        return POSITIONS[model_facts.position_type(vars(self))]()

    @property
    def tied(self) -> bool:
        """Whether embedding and output are one table."""
        if self._folder is not None:
            return self._folder.share_embeddings_and_output_weights
        return bool(model_facts.plain(vars(self))["tie_embeddings"])

    def vocabulary(self, tokens: int) -> int:
        """Rows of the embedding where the tokenizer has so many tokens. Raises ValueError: it has fewer."""
        rows = self._folder.vocab_size if self._folder is not None else self.vocab_size
        if rows is None:
            return tokens
        if rows < tokens:
            if self._folder is None:
                model = "model.vocab_size"
            else:
                model = f"model.huggingface={self.huggingface}"
            added = ""
            if self._folder is not None:
                added = "; where tokens were added to it, transformers' model.resize_token_embeddings(len(tokenizer))"
                added += " before save_pretrained makes their rows"
            raise ValueError(
                f"the tokenizer has {tokens} tokens, the embedding of {model} has {rows} rows; use the tokenizer "
                f"that the model was made with, and prepare the text with it{added}"
            )
        return rows

    @property
    def folder_positions(self) -> int | None:
        """Positions that the Hugging Face folder says of its model; None without one."""
        return self._folder.max_sequence_length if self._folder is not None else None

    def positions(self, sequence_length: int) -> int:
        """Positions of the model in a run of that length; learned ones are as many as the model has."""
        if self._folder is not None:
            has_table = self._folder.transformer_layer_spec.positions is not None
            if has_table:
                return self._folder.max_sequence_length
            return sequence_length
        return self.max_position_embeddings or sequence_length

    def arguments(self, tokens: int, sequence_length: int) -> dict[str, Any]:
        """The keyword arguments of GPTModel; see `vocabulary` and `positions`."""
        return {
            "config": self.transformer(),
            "transformer_layer_spec": self.spec(),
            "vocab_size": self.vocabulary(tokens),
            "max_sequence_length": self.positions(sequence_length),
            "share_embeddings_and_output_weights": self.tied,
        }

    def resolved(self) -> dict[str, Any]:
        """Field -> value of the facts that nobody gave. Raises ValueError: a folder without them."""
        if self._folder is not None:
            facts = model_facts.of_folder(replace(self._folder, config=self.transformer()))
        else:
            facts = model_facts.plain(vars(self))
        return {
            name: value
            for name, value in facts.items()
            if model_facts.is_left_out(getattr(self, name))
        }

    def source_of(self, name: str) -> str | None:
        """The field that a fact follows which nobody gave: "huggingface", "preset"; None: a default."""
        if self.huggingface is not None:
            return "huggingface"
        if model_facts.of_preset(name, self.preset):
            return "preset"
        return None
