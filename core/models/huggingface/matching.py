"""The family that says every fact of a model of ours, so that it can be written as one of theirs."""

from typing import Any

from core.models.huggingface.facts import Facts
from core.models.huggingface.families import FAMILIES
from core.models.huggingface.family.family import Family, Fields, HuggingFaceModel
from core.transformer.precision import FP8_FIELDS

# how a model is stored, initialised and trained, no facts of it
_SETTINGS = (
    "params_dtype",
    "pipeline_dtype",
    "use_cpu_initialization",
    "moe_router_load_balancing_type",
    "moe_router_bias_update_rate",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    *FP8_FIELDS,
)
_OF_EXPERTS = (
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
)


def matching_family(model: HuggingFaceModel) -> tuple[Family, Fields]:
    """The first family whose fields, read back, are the model; and those fields.

    Raises ValueError: no family says every fact; which ones the closest does not say.
    """
    different: dict[str, list[str]] = {}
    for kind, family in FAMILIES.items():
        # there and back: a fact that a family cannot say comes back as its default, and so differs
        fields = {"architectures": [family.architecture], "model_type": kind} | family.fields(model)
        different[kind] = _differences(model, family, Facts(fields), kind)
        if not different[kind]:
            return family, fields
    closest = min(different, key=lambda kind: len(different[kind]))
    raise ValueError(
        f"no family of Hugging Face's has {' and '.join(different[closest])}, which the model is made with; "
        f"{closest} has all else (known: {', '.join(FAMILIES)})"
    )


def matching_architectures(model: HuggingFaceModel) -> dict[str, Family]:
    """By architecture every family that says all facts of the model: their names of one parameter may differ."""
    found = {}
    for kind, family in FAMILIES.items():
        fields = {"architectures": [family.architecture], "model_type": kind} | family.fields(model)
        if not _differences(model, family, Facts(fields), kind):
            found[family.architecture] = family
    return found


def _differences(model: HuggingFaceModel, family: Family, fields: Facts, kind: str) -> list[str]:
    """What the fields of a family say otherwise, or cannot say."""
    ours = _facts(model)
    read = _facts(family.model(fields, model.config.params_dtype))
    different = [
        f"{name}={ours[name]} ({kind}: {read[name]})" for name in ours if ours[name] != read[name]
    ]
    return different or [message for holds, message in family.rules(fields) if not holds]


def _facts(model: HuggingFaceModel) -> dict[str, Any]:
    """Name -> value of every fact, equal exactly if two models are."""
    config = model.config
    facts = {name: value for name, value in vars(config).items() if name not in _SETTINGS}
    # what may be said in two ways
    for name in ("rotary_base", "rotary_percent", "rotary_scaling"):
        facts.pop(name)
    per_layer = config.rotary_per_layer or (config.rotary,) * config.num_layers
    facts["rotary_per_layer"] = (
        per_layer if model.transformer_layer_spec.rotary is not None else None
    )
    facts["windows"] = config.windows or (None,) * config.num_layers
    facts["softmax_scale"] = [config.score_scale(layer) for layer in range(config.num_layers)]
    facts["latent_layernorm_epsilon"] = config.latent_layernorm_epsilon or config.layernorm_epsilon
    layers = [config.has_experts(layer) for layer in range(config.num_layers)]
    # without experts their settings say nothing, whatever their values
    if not any(layers):
        facts |= dict.fromkeys(_OF_EXPERTS)
    else:
        facts |= {"moe_layer_freq": layers, "moe_ffn_hidden_size": config.moe_ffn}
    facts["moe_router_topk_scaling_factor"] = config.moe_router_topk_scaling_factor or 1.0
    if all(layers):  # no MLP
        facts["ffn_hidden_size"] = None
    for name, part in vars(model.transformer_layer_spec).items():
        facts[f"spec.{name}"] = getattr(part, "__name__", part)
    others = ("vocab_size", "max_sequence_length", "share_embeddings_and_output_weights")
    return facts | {name: getattr(model, name) for name in others}
