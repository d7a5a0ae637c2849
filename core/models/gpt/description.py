"""What a GPTModel is built of as JSON values, and back: what a checkpoint says of its model."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from core.models.gpt.gpt_layer_specs import SPECS
from core.models.gpt.gpt_model import GPTModel
from core.transformer.activations import ACTIVATIONS
from core.transformer.precision import FP8_FIELDS
from core.transformer.spec import TransformerLayerSpec
from core.transformer.transformer_config import RotaryConfig, RotaryScaling, TransformerConfig


def description(model: GPTModel) -> dict[str, Any]:
    """The facts of the whole model; any of its pipeline stages knows them.

    A spec of the user's own has no name: `transformer_layer_spec` is None then.
    """
    return description_of(
        config=model.config,
        transformer_layer_spec=model.transformer_layer_spec,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        share_embeddings_and_output_weights=model.tied,
    )


def description_of(
    *, config: TransformerConfig, transformer_layer_spec: TransformerLayerSpec, **sizes: Any
) -> dict[str, Any]:
    """The same of arguments of GPTModel; the inverse of `described`."""
    name = next((name for name, made in SPECS.items() if made() == transformer_layer_spec), None)
    return {"config": _values(TransformerConfig, config), "transformer_layer_spec": name, **sizes}


# what a model may change without being another one: its memory, its first values, how it is trained
_OF_THE_RUN = {
    "params_dtype",
    "pipeline_dtype",
    "use_cpu_initialization",
    "init_method_std",
    "hidden_dropout",
    "attention_dropout",
    "moe_router_load_balancing_type",
    "moe_router_bias_update_rate",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    *FP8_FIELDS,
}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Facts in which two descriptions are of different models, each as "name=value (now value)".

    Shapes do not show them: a rotary base, a norm's epsilon, a window. The length of sequences may differ.
    """
    pairs = [(name, before["config"].get(name), value) for name, value in now["config"].items()]
    pairs = [pair for pair in pairs if pair[0] in before["config"] and pair[0] not in _OF_THE_RUN]
    for name in ("transformer_layer_spec", "share_embeddings_and_output_weights"):
        pairs.append((name, before[name], now[name]))
    return [f"{name}={old} (now {new})" for name, old, new in pairs if not _says(new, old)]


# what shapes follow from: weights of another are of no use
_SIZES = {
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "gated_linear_unit",
    "multi_latent_attention",
}


def differences_of_sizes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Those of `differences`, and the vocabulary's size, by which weights have other shapes."""
    changed = [text for text in differences(before, now) if text.partition("=")[0] in _SIZES]
    if before["vocab_size"] != now["vocab_size"]:
        changed.append(f"vocab_size={before['vocab_size']} (now {now['vocab_size']})")
    return changed


def _says(new: Any, old: Any) -> bool:
    """Whether they are equal, but for facts inside that an older version did not know."""
    if isinstance(new, dict) and isinstance(old, dict):
        return all(name in new and _says(new[name], value) for name, value in old.items())
    if isinstance(new, list) and isinstance(old, list):
        return len(new) == len(old) and all(map(_says, new, old))
    return bool(new == old)


def described(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of GPTModel that a description says.

    Raises ValueError: a spec or a function of the user's own, facts that this version does not know.
    """
    try:
        spec = _spec(values["transformer_layer_spec"])
        config = _config(values["config"])
        sizes = {name: values[name] for name in ("vocab_size", "max_sequence_length")}
        tied = bool(values["share_embeddings_and_output_weights"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a model is described in a way that this version does not know: {error!r}"
        ) from error
    return {
        "config": config,
        "transformer_layer_spec": spec,
        **sizes,
        "share_embeddings_and_output_weights": tied,
    }


def _spec(name: str | None) -> TransformerLayerSpec:
    if name not in SPECS:
        raise ValueError(
            f"the layers are of a spec of the run's own (transformer_layer_spec={name!r}); known: {', '.join(SPECS)}"
        )
    return SPECS[name]()


def _values(kind: type, instance: Any) -> dict[str, Any]:
    """The fields of the dataclass `kind`, without those of a class derived from it."""
    return {field.name: _value(getattr(instance, field.name)) for field in fields(kind)}


def _value(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if is_dataclass(value) and not isinstance(value, type):
        return _values(type(value), value)
    if isinstance(value, tuple):
        return [_value(one) for one in value]
    # an activation: by our name, or by one that nobody has
    if callable(value):
        own = f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        return next((name for name, function in ACTIVATIONS.items() if function is value), own)
    return value


def _config(values: Mapping[str, Any]) -> TransformerConfig:
    arguments = dict(values)
    for name in ("params_dtype", "pipeline_dtype"):
        if arguments.get(name) is not None:
            arguments[name] = getattr(torch, arguments[name])
    if arguments.get("windows") is not None:
        arguments["windows"] = tuple(arguments["windows"])
    if arguments.get("rotary_scaling") is not None:
        arguments["rotary_scaling"] = RotaryScaling(**arguments["rotary_scaling"])
    if arguments.get("rotary_per_layer") is not None:
        arguments["rotary_per_layer"] = tuple(map(_rotary, arguments["rotary_per_layer"]))
    return TransformerConfig(**arguments)


def _rotary(values: Mapping[str, Any] | None) -> RotaryConfig | None:
    if values is None:
        return None
    scaling = values["scaling"]
    return RotaryConfig(
        **dict(values) | {"scaling": None if scaling is None else RotaryScaling(**scaling)}
    )
