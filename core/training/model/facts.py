"""From the fields of a model that were given to all of its facts: preset, style, a small Llama; what contradicts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from core.models import gpt
from core.training.functions import is_function_name
from core.transformer.transformer_config import RotaryScaling, TransformerConfig

if TYPE_CHECKING:
    from core.models.huggingface import HuggingFaceModel
    from core.transformer.spec import TransformerLayerSpec

# what a model is where neither a preset nor a style says: small enough for a laptop
DEFAULTS: dict[str, Any] = {
    "style": "llama",
    "num_layers": 4,
    "hidden_size": 192,
    "num_attention_heads": 8,
    "num_query_groups": None,
    "kv_channels": None,
    "ffn_hidden_size": 512,
    "normalization": None,
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "qk_layernorm": False,
    "activation_func": None,
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "dropout": 0.0,
    "hidden_dropout": None,
    "attention_dropout": None,
    "position_embedding_type": None,
    "max_position_embeddings": None,
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "rotary_scaling": {},
    "rotary_interleaved": False,
    "softmax_scale": None,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "kv_lora_rank": None,
    "qk_head_dim": None,
    "qk_pos_emb_head_dim": None,
    "v_head_dim": None,
    "latent_layernorm_epsilon": None,
    "embedding_multiplier": 1.0,
    "num_moe_experts": None,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_group_score_topk": 2,
    "moe_router_enable_expert_bias": False,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "init_method_std": 0.02,
    "vocab_size": None,
    "tie_embeddings": True,
}
# facts that a Hugging Face folder has, and that nobody may give beside it, but for dropout
FACTS = (*DEFAULTS, "windows", "moe_layer_freq")
# how a model is trained, not what it is: they may be given beside a folder
_DROPOUT = ("dropout", "hidden_dropout", "attention_dropout")
# that no config.json says
_OF_TRAINING = ("moe_router_bias_update_rate",)
_ROTARY = ("rotary_base", "rotary_percent", "rotary_scaling")
_OF_STYLE = (
    "normalization",
    "activation_func",
    "gated_linear_unit",
    "add_bias_linear",
    "position_embedding_type",
)
_STYLE_POSITIONS = {"llama": "rope", "gpt2": "learned_absolute"}


def _no_positions() -> "TransformerLayerSpec":
    return replace(gpt.gpt2_spec(), positions=None)


POSITIONS: dict[str, Callable[[], "TransformerLayerSpec"]] = {
    "rope": lambda: gpt.llama_spec(),
    "learned_absolute": lambda: gpt.gpt2_spec(),
    "none": _no_positions,
}


def is_left_out(value: Any) -> bool:
    """Whether a field says nothing, so that a preset, a folder, a style or a default does."""
    return value is None or value == () or value == {}


def given(values: Mapping[str, Any]) -> list[str]:
    """The facts that a user gave."""
    return [name for name in FACTS if not is_left_out(values[name])]


def rules(values: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """(holds, message) of the fields of a model among each other; nothing is read from disk."""
    preset = values["preset"]
    folder = values["huggingface"]
    build = values["build"]
    close = get_close_matches(str(preset), gpt.PRESETS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    yield (
        preset is None or preset in gpt.PRESETS,
        f"unknown preset {preset!r}; {hint}known: {', '.join(gpt.PRESETS)}",
    )
    for name, value in (("preset", preset), ("build", build)):
        yield (
            folder is None or value is None,
            f"model.huggingface={folder} and model.{name}={value} are 2 models for one run; give one of them",
        )
    yield (
        preset is None or build is None,
        f"model.preset={preset} and model.build={build} are 2 models for one run; give one of them",
    )
    if folder is not None:
        for name in given(values):
            yield (
                name in (*_DROPOUT, *_OF_TRAINING),
                f"model.{name}={values[name]} is given beside model.huggingface={folder}, whose config.json says it "
                f"too; leave model.{name} out",
            )
    yield (
        build is None or is_function_name(build),
        f"build={build!r} is no function; write package.module:function",
    )
    yield from _style_rules(values)
    yield from _position_rules(values)


def _style_rules(values: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    style = values["style"]
    preset = gpt.PRESETS.get(values["preset"])
    yield style in (None, *gpt.STYLES), f"unknown style {style!r}; known: {', '.join(gpt.STYLES)}"
    yield (
        style is None or preset is None or style == preset.style,
        f"style={style} contradicts preset={values['preset']}, whose style is {preset and preset.style}; leave style "
        "out, or give single facts",
    )


def _position_rules(values: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    kind = values["position_embedding_type"]
    positions = values["max_position_embeddings"]
    yield (
        kind in (None, *POSITIONS),
        f"unknown position_embedding_type {kind!r}; known: {', '.join(POSITIONS)}",
    )
    yield (
        positions is None or positions >= 1,
        f"max_position_embeddings={positions} must be at least 1",
    )
    vocab = values["vocab_size"]
    yield vocab is None or vocab >= 1, f"vocab_size={vocab} must be at least 1"
    experts = values["num_moe_experts"] is not None or _is_made_elsewhere(values)
    for name in given(values):
        yield (
            not name.startswith("moe_") or experts,
            f"{name}={values[name]} is of experts, and num_moe_experts is not given; give it, or leave {name} out",
        )
    for number in values["moe_layer_freq"]:
        yield (
            number.isdecimal(),
            (
                f"moe_layer_freq holds {number!r}; give one whole number n, experts in every n-th layer, or a 0 or 1 "
                "for each layer: --model.moe-layer-freq 0 1 1 1, in TOML [0, 1, 1, 1]"
            ),
        )
    for window in values["windows"]:
        yield (
            _is_window(window),
            f"windows holds {window!r}; whole numbers of at least 1 and None are windows",
        )
    scaling = values["rotary_scaling"]
    known = [field.name for field in fields(RotaryScaling)]
    strange = [name for name in scaling if name not in known]
    yield not strange, f"rotary_scaling has {', '.join(strange)}; known: {', '.join(known)}"
    if scaling and not strange and scaling.get("kind") != "none":
        try:
            scaling_of(scaling)
        except (ValueError, TypeError) as error:
            yield (
                False,
                f"rotary_scaling={dict(scaling)}: {str(error).removeprefix('RotaryScaling: ')}",
            )
    # `position_type` looks a style up; an unknown one has been told above
    known_style = values["style"] in (None, *gpt.STYLES) and values["preset"] in (
        None,
        *gpt.PRESETS,
    )
    if known_style and values["build"] is None and position_type(values) != "rope":
        for name in _ROTARY:
            yield (
                is_left_out(values[name]),
                f"{name}={values[name]} is of rotary positions, position_embedding_type={position_type(values)} has "
                "none; leave it out, or use rope",
            )


def _is_made_elsewhere(values: Mapping[str, Any]) -> bool:
    """Whether a folder or a function of the user's says what the model is."""
    return values["huggingface"] is not None or values["build"] is not None


def _is_window(text: str) -> bool:
    return text == "None" or (text.isdecimal() and int(text) >= 1)


def _style_of(values: Mapping[str, Any]) -> str:
    preset = gpt.PRESETS.get(values["preset"])
    return str(values["style"] or (preset.style if preset else DEFAULTS["style"]))


def position_type(values: Mapping[str, Any]) -> str:
    """How tokens know their positions: as given, or as the style has it."""
    return str(values["position_embedding_type"] or _STYLE_POSITIONS[_style_of(values)])


def scaling_of(table: Mapping[str, Any]) -> RotaryScaling:
    """Raises ValueError, TypeError: a scaling that cannot be, or without kind or factor."""
    arguments = dict(table)
    original = arguments.get("original_max_position_embeddings")
    if isinstance(original, float):
        # numbers of a table are read as floats
        arguments["original_max_position_embeddings"] = int(original)
    return RotaryScaling(**arguments)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> value, as a file would say it, of every fact of the model that `values` of a ModelConfig describe.

    What is given goes before the preset, the preset before the style, the style before a small Llama.
    """
    preset = gpt.PRESETS.get(values["preset"])
    style = _style_of(values)
    facts = dict(DEFAULTS) | {"normalization": "LayerNorm"} | dict(gpt.STYLES[style])
    # a style's dropout is its publication's; a run's is 0 unless somebody asks for it
    facts |= {"style": style, "hidden_dropout": None, "attention_dropout": None}
    if preset is not None:
        facts |= dict(preset.facts) | {"tie_embeddings": preset.tied}
    facts |= {name: values[name] for name in DEFAULTS if not is_left_out(values[name])}
    facts["position_embedding_type"] = position_type(values)
    for name in ("hidden_dropout", "attention_dropout"):
        facts[name] = facts["dropout"] if facts[name] is None else facts[name]
    return {name: facts[name] for name in DEFAULTS}


def of_preset(name: str, preset: str | None) -> bool:
    """Whether a preset says this fact."""
    if preset is None:
        return False
    return name in gpt.PRESETS[preset].facts or name in ("style", "tie_embeddings", *_OF_STYLE)


def given_beside_folder(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of training beside a folder, in place of what its config.json says."""
    both = values["dropout"]
    found = {name: values[name] for name in ("hidden_dropout", "attention_dropout")}
    found = {name: both if value is None else value for name, value in found.items()}
    found |= {name: values[name] for name in _OF_TRAINING}
    return {name: value for name, value in found.items() if value is not None}


def of_folder(model: "HuggingFaceModel") -> dict[str, Any]:
    """The facts of a Hugging Face model under the same names."""
    facts = {name: value for name, value in vars(model.config).items() if name in DEFAULTS}
    spec = model.transformer_layer_spec
    scaling = model.config.rotary_scaling
    table = asdict(scaling) if scaling is not None else {}
    if spec.rotary is not None:
        kind = "rope"
    elif spec.positions is not None:
        kind = "learned_absolute"
    else:
        kind = "none"
    windows = model.config.windows or ()
    return facts | {
        "rotary_scaling": {name: value for name, value in table.items() if value is not None},
        "windows": tuple(str(window) for window in windows),
        "moe_layer_freq": _frequency_texts(model.config.moe_layer_freq),
        "position_embedding_type": kind,
        "max_position_embeddings": model.max_sequence_length,
        "vocab_size": model.vocab_size,
        "tie_embeddings": model.share_embeddings_and_output_weights,
    }


def transformer_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts as TransformerConfig takes them."""
    facts = plain(values)
    table = facts["rotary_scaling"]
    typed = {
        "rotary_scaling": scaling_of(table) if table and table["kind"] != "none" else None,
        "windows": _windows_of_layers(values["windows"], facts["num_layers"]),
        "moe_layer_freq": _layer_frequency(values["moe_layer_freq"]),
        "use_cpu_initialization": values["use_cpu_initialization"],
    }
    known = TransformerConfig.__dataclass_fields__
    return {name: value for name, value in (facts | typed).items() if name in known}


def _frequency_texts(frequency: int | tuple[int, ...]) -> tuple[str, ...]:
    if isinstance(frequency, tuple):
        return tuple(map(str, frequency))
    return (str(frequency),)


def _layer_frequency(given: tuple[str, ...]) -> int | tuple[int, ...]:
    """One number is a frequency, several say it of each layer."""
    numbers = tuple(int(text) for text in given)
    if len(numbers) > 1:
        return numbers
    if numbers:
        return numbers[0]
    return 1


def _windows_of_layers(pattern: tuple[str, ...], num_layers: int) -> tuple[int | None, ...] | None:
    """The pattern, repeated over the layers."""
    if not pattern:
        return None
    widths = [None if text == "None" else int(text) for text in pattern]
    return tuple(widths[layer % len(widths)] for layer in range(num_layers))
