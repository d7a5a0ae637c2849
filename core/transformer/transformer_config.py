"""The facts of a model; how it is split, trained or saved is configured elsewhere."""

from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from math import inf, log, sqrt

import torch

from core.elsewhere import OF_A_MODEL
from core.field_names import tells_names
from core.parallel_state.config import divisors, raise_all
from core.transformer.activations import ACTIVATIONS, Activation
from core.transformer.attention.latent_rules import LATENT_SIZES, latent_rules
from core.transformer.moe.rules import moe_rules, no_capacity
from core.transformer.precision import fp8_rules

NORMALIZATIONS = ("LayerNorm", "RMSNorm")
ROTARY_SCALINGS = ("linear", "llama3", "yarn")


@tells_names(remedies={"rope_type": "give kind", "type": "give kind"})
@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How a model's rotary frequencies were changed to reach longer sequences than it was first trained on.

    linear: every frequency is divided by `factor` (position interpolation, arXiv 2306.15595). llama3: only the slow
    ones are, whose wavelength exceeds `original_max_position_embeddings / low_freq_factor` tokens; those shorter than
    `original_max_position_embeddings / high_freq_factor` stay, between them it is interpolated (Llama 3.1). yarn
    (arXiv 2309.00071): pairs of dims that turn more than `beta_fast` times in the original length stay, those that
    turn less than `beta_slow` times are divided, between them it is interpolated by the pair's number; with m(c) =
    0.1 c ln(factor) + 1, cos and sin are multiplied by m(mscale) / m(mscale_all_dim) (or by `attention_factor`, if
    given), scores by m(mscale_all_dim)^2.

    Raises ValueError with every rule that does not hold.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        low = self.low_freq_factor
        high = self.high_freq_factor
        original = self.original_max_position_embeddings
        rules = [
            (
                self.kind in ROTARY_SCALINGS,
                f"unknown kind {self.kind!r}; known: {', '.join(ROTARY_SCALINGS)}",
            ),
            (1 <= self.factor < inf, f"factor={self.factor} must be at least 1 and finite"),
            (
                0 < low < high,
                f"low_freq_factor={low} must lie between 0 and high_freq_factor={high}",
            ),
            (original >= 1, f"original_max_position_embeddings={original} must be at least 1"),
            (
                0 < self.beta_slow <= self.beta_fast,
                f"beta_slow={self.beta_slow} must be positive, and at most beta_fast={self.beta_fast}",
            ),
        ]
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            rules.append((0 <= value < inf, f"{name}={value} must not be negative, and finite"))
        given = self.attention_factor
        rules += [
            (
                given is None or 0 < given < inf,
                f"attention_factor={given} must be positive, and finite",
            ),
            (
                given is None or self.kind == "yarn",
                f"attention_factor={given} with kind={self.kind!r}: only yarn has one; leave it out",
            ),
        ]
        raise_all("RotaryScaling", rules)

    def _magnitude(self, coefficient: float) -> float:
        """m(coefficient) of yarn; 1 of the other kinds."""
        if self.kind != "yarn":
            return 1.0
        return 0.1 * coefficient * log(self.factor) + 1

    @property
    def table_factor(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """What the scores of attention are multiplied by."""
        return self._magnitude(self.mscale_all_dim) ** 2


@tells_names()
@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """The rotary positions of a layer: the pair of dims 2i turns by base^(-2i/d) radians per token, before `scaling`.

    percent: the share of a head's dims that turn. Raises ValueError with every rule that does not hold.
    """

    base: float = 10000.0
    percent: float = 1.0
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        rules = [
            (0 < self.base < inf, f"base={self.base} must be positive and finite"),
            (0 < self.percent <= 1, f"percent={self.percent} must lie in (0, 1]"),
        ]
        raise_all("RotaryConfig", rules)


@tells_names("model", OF_A_MODEL)
@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Facts of a model, under Megatron's names. Sizes in elements; None means the default named in its comment.

    Raises ValueError with every rule that does not hold.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None  # num_attention_heads; 1 is multi-query attention
    ffn_hidden_size: int | None = None  # 4 * hidden_size
    kv_channels: int | None = None  # hidden_size / num_attention_heads: the size of one head
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    # norms multiply by 1 + weight, and weights begin at 0 (Gemma)
    layernorm_zero_centered_gamma: bool = False
    qk_layernorm: bool = (
        False  # normalise each head of query and key; of latent attention the latents
    )
    activation_func: str | Activation = "gelu"
    gated_linear_unit: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False  # a bias on query, key and value even without add_bias_linear
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_scaling: RotaryScaling | None = None  # the frequencies as `rotary_base` gives them
    # per layer, instead of the three above; a layer with None does not rotate (NoPE, arXiv 2305.19466)
    rotary_per_layer: tuple[RotaryConfig | None, ...] | None = None
    rotary_interleaved: bool = False  # pairs are neighbours instead of half a head apart
    # head_size ** -0.5 times what yarn asks for: of the scores, before their softmax
    softmax_scale: float | None = None
    # queries, keys and values of latents; see core/transformer/attention/latent.py
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None  # None: queries are projected without a latent
    kv_lora_rank: int | None = None  # 512
    qk_head_dim: int | None = None  # 128: the part of a query and key head that does not rotate
    qk_pos_emb_head_dim: int | None = None  # 64: the part that does
    v_head_dim: int | None = None  # 128
    latent_layernorm_epsilon: float | None = None  # layernorm_epsilon: of the latents' norms
    # of token embeddings; a tied output layer multiplies by the table itself
    embedding_multiplier: float = 1.0
    # per layer: tokens that a token sees, itself included
    windows: tuple[int | None, ...] | None = None
    # a mixture of experts in the place of MLPs; see core/transformer/moe
    num_moe_experts: int | None = None  # None: no layer has experts
    # n: every n-th layer from the first; or 1 or 0 of each layer
    moe_layer_freq: int | tuple[int, ...] = 1
    moe_router_topk: int = 2  # experts of a token
    moe_ffn_hidden_size: int | None = None  # ffn_hidden_size: the width of one expert
    # of an MLP that every token uses beside its experts
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_score_function: str = "softmax"  # or "sigmoid"
    moe_router_pre_softmax: bool = False  # softmax over all experts instead of the chosen ones
    moe_router_topk_scaling_factor: float | None = None  # of the weights
    moe_router_num_groups: int | None = None  # experts are chosen from the best groups only
    moe_router_group_topk: int | None = None  # so many groups
    moe_router_group_score_topk: int = 2  # by the sum of so many of their largest scores
    # added to scores for the choice; moves after each step
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3  # by so much
    # of a microbatch; "seq_aux_loss": each sequence; "global_aux_loss": the global batch before; "none"
    moe_router_load_balancing_type: str = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_expert_capacity_factor: InitVar[float | None] = None  # refused: no token is dropped
    init_method_std: float = 0.02
    params_dtype: torch.dtype = (
        torch.float32
    )  # of weights and activations; torch.set_default_dtype is not asked
    pipeline_dtype: torch.dtype | None = None  # params_dtype: what crosses a stage boundary
    # False: each device draws for itself (faster; values differ by device type)
    use_cpu_initialization: bool = True
    # 8-bit products of the layers' linears; see core/autograd/fp8.py
    fp8: str | None = None  # "e4m3", or "hybrid": e5m2 of output gradients
    fp8_recipe: str = "tensorwise"  # one scale for a tensor, or "rowwise": for each row
    fp8_wgrad: bool = True  # False: weight gradients are products of `params_dtype`
    # layers at both ends that stay in `params_dtype`
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1

    def __post_init__(self, moe_expert_capacity_factor: float | None) -> None:
        def default(name: str, value: int) -> None:
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

        if self.multi_latent_attention:
            for name, value in LATENT_SIZES.items():
                default(name, value)
            default("kv_channels", self.head_size)
        default("num_query_groups", self.num_attention_heads)
        default("ffn_hidden_size", 4 * self.hidden_size)
        if isinstance(self.moe_layer_freq, list):
            object.__setattr__(self, "moe_layer_freq", tuple(self.moe_layer_freq))
        raise_all("TransformerConfig", (*self._rules(), no_capacity(moe_expert_capacity_factor)))
        default("kv_channels", self.hidden_size // self.num_attention_heads)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "ffn_hidden_size",
        ):
            yield getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1"
        heads = self.num_attention_heads
        groups = self.groups
        hidden = self.hidden_size
        yield (
            self.kv_channels is not None or heads < 1 or hidden % heads == 0,
            f"hidden_size={hidden} does not divide by num_attention_heads={heads}; use "
            f"{_nearest_sizes(hidden, heads)}, or give kv_channels",
        )
        yield (
            groups < 1 or heads % groups == 0,
            f"num_attention_heads={heads} does not divide by num_query_groups={groups}; valid: "
            f"{', '.join(map(str, divisors(max(heads, 1))))}",
        )
        yield (
            self.normalization in NORMALIZATIONS,
            f"unknown normalization {self.normalization!r}; known: {', '.join(NORMALIZATIONS)}",
        )
        yield (
            callable(self.activation_func) or self.activation_func in ACTIVATIONS,
            f"unknown activation_func {self.activation_func!r}; known: {', '.join(ACTIVATIONS)}, or a function",
        )
        yield from self._attention_rules()
        yield from latent_rules(self)
        yield from moe_rules(self)
        yield from fp8_rules(self)
        yield (
            self.layernorm_epsilon > 0,
            f"layernorm_epsilon={self.layernorm_epsilon} must be positive",
        )
        yield (
            self.init_method_std >= 0,
            f"init_method_std={self.init_method_std} must not be negative",
        )
        yield (
            self.params_dtype.is_floating_point,
            f"params_dtype={self.params_dtype} must be a floating type",
        )
        yield (
            self.pipeline_dtype in (None, self.params_dtype),
            f"pipeline_dtype={self.pipeline_dtype} must be None or params_dtype={self.params_dtype}: stages "
            "exchange activations in the parameters' dtype",
        )

    def _attention_rules(self) -> Iterator[tuple[bool, str]]:
        """Dropout, positions, windows and scales."""
        for name in ("hidden_dropout", "attention_dropout"):
            yield 0 <= getattr(self, name) < 1, f"{name}={getattr(self, name)} must lie in [0, 1)"
        yield (
            0 < self.rotary_percent <= 1,
            f"rotary_percent={self.rotary_percent} must lie in (0, 1]",
        )
        for name in ("windows", "rotary_per_layer"):
            layers = getattr(self, name)
            yield (
                layers is None or len(layers) == self.num_layers,
                f"{name} names {len(layers or ())} layers, num_layers={self.num_layers}; give one for each",
            )
        for name in ("softmax_scale", "embedding_multiplier"):
            value = getattr(self, name)
            yield value is None or 0 < value < inf, f"{name}={value} must be positive and finite"
        if self.windows is not None:
            narrow = [window for window in self.windows if window is not None and window < 1]
            yield (
                not narrow,
                f"windows holds {narrow[:1]}; a token sees itself, so at least 1 is needed",
            )

    @property
    def groups(self) -> int:
        """Query groups: pairs of key and value heads."""
        assert self.num_query_groups is not None
        return self.num_query_groups

    @property
    def head_size(self) -> int:
        """Elements of one head of query and key."""
        if self.multi_latent_attention:
            assert self.qk_head_dim is not None and self.qk_pos_emb_head_dim is not None
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        if self.kv_channels is not None:
            return self.kv_channels
        return self.hidden_size // self.num_attention_heads

    @property
    def value_size(self) -> int:
        """Elements of one head of values."""
        if self.multi_latent_attention:
            assert self.v_head_dim is not None
            return self.v_head_dim
        return self.head_size

    @property
    def rotary_size(self) -> int:
        """Elements of a head that rotate where `rotary_percent` is 1."""
        if self.multi_latent_attention:
            assert self.qk_pos_emb_head_dim is not None
            return self.qk_pos_emb_head_dim
        return self.head_size

    def score_scale(self, layer: int) -> float:
        """What the scores of layer `layer` (a global number) are multiplied by before their softmax."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        rotary = self.rotary_per_layer[layer] if self.rotary_per_layer else self.rotary
        scale = self.head_size**-0.5
        if rotary is None or rotary.scaling is None:
            return scale
        return scale * rotary.scaling.score_factor

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
        assert self.ffn_hidden_size is not None
        return self.ffn_hidden_size

    @property
    def moe_ffn(self) -> int:
        """Width of one expert."""
        if self.moe_ffn_hidden_size is None:
            return self.ffn
        return self.moe_ffn_hidden_size

    @property
    def balances_experts(self) -> bool:
        """Whether auxiliary losses are added to the model's."""
        has_aux = self.moe_router_load_balancing_type != "none" and self.moe_aux_loss_coeff > 0
        return self.num_moe_experts is not None and (has_aux or bool(self.moe_z_loss_coeff))

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` (a global number) has experts in the place of an MLP."""
        if self.num_moe_experts is None:
            return False
        if isinstance(self.moe_layer_freq, int):
            return layer % self.moe_layer_freq == 0
        return bool(self.moe_layer_freq[layer])

    @property
    def rotary(self) -> RotaryConfig:
        """Of every layer, where `rotary_per_layer` does not say otherwise."""
        return RotaryConfig(
            base=self.rotary_base, percent=self.rotary_percent, scaling=self.rotary_scaling
        )

    @property
    def activation(self) -> Activation:
        """The activation as a function."""
        if callable(self.activation_func):
            return self.activation_func
        return ACTIVATIONS[self.activation_func]

    @property
    def output_std(self) -> float:
        """Initial std of the layers that write to the residual stream: smaller with depth (GPT-2, section 2.3)."""
        return self.init_method_std / sqrt(2 * self.num_layers)


def _nearest_sizes(hidden: int, heads: int) -> str:
    heads = max(1, heads)  # another rule refuses fewer than one
    below = hidden // heads * heads
    if below:
        return f"{below} or {below + heads}"
    return str(heads)
