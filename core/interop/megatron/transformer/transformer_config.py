"""Megatron's `TransformerConfig` and `MLATransformerConfig`: the fields of a model; sizes must be the layout's."""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch

from core.elsewhere import ELSEWHERE
from core.interop.megatron.transformer.read_fields import (
    NO_EFFECT,
    SIZES,
    ReadFields,
    check_sizes,
    take_sequence_parallel,
)
from core.transformer.transformer_config import RotaryScaling
from core.transformer.transformer_config import TransformerConfig as ModelConfig

# in words of its own
_REFUSED_BY_THE_MODEL = ("moe_expert_capacity_factor",)
_MODEL_FIELDS = frozenset(field.name for field in fields(ModelConfig)).union(_REFUSED_BY_THE_MODEL)
# how a step is run: stays an attribute, some are functions that scripts put there
_RUNTIME_DEFAULTS = {
    "finalize_model_grads_func": None,
    "grad_scale_func": None,
    "calculate_per_token_loss": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "virtual_pipeline_model_parallel_size": None,
}
# one value each: what is so anyway
_FIXED = {"expert_tensor_parallel_size": 1, "moe_router_dtype": "fp32"}


class TransformerConfig(ReadFields, ModelConfig):
    """Ours, taking Megatron's other fields: sizes are compared with the current state, bf16 and fp16 become
    `params_dtype`, fields without effect on numbers are only read (see `ReadFields`).

    Raises ValueError: a size that is not the current one; a field that is not here, unless it is None, False or 0;
    fp8 with Megatron's default recipe, "delayed".
    """

    def __init__(self, **arguments: Any) -> None:
        arguments = _checked_fp8(arguments)
        model_fields = {
            name: arguments.pop(name) for name in list(arguments) if name in _MODEL_FIELDS
        }
        runtime_fields = {
            name: arguments.pop(name, default) for name, default in _RUNTIME_DEFAULTS.items()
        }
        only_read = dict(arguments)
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if arguments.pop(name, False):
                model_fields.setdefault("params_dtype", dtype)
        # the layout of ranks is said once, to initialize_model_parallel: here it may only agree
        sizes = {name: arguments.pop(name) for name in list(arguments) if name in SIZES}
        check_sizes(sizes)
        splits_sequence = arguments.pop("sequence_parallel", None)
        take_sequence_parallel(splits_sequence)

        requested = [name for name, value in arguments.items() if value not in (None, False, 0)]
        requested = [
            name for name in requested if name not in _FIXED or arguments[name] != _FIXED[name]
        ]
        unknown = [
            f"{name}={arguments[name]} (here: {_FIXED[name]})" if name in _FIXED else name
            for name in requested
            if name not in NO_EFFECT
        ]
        if unknown:
            raise ValueError(_not_here(sorted(unknown)))
        best = model_fields.get("moe_router_group_topk")
        if best is not None:
            # Megatron has no field for it
            counted = max(1, model_fields.get("moe_router_topk", 2) // best)
            model_fields.setdefault("moe_router_group_score_topk", counted)
        super().__init__(**model_fields)
        self.keep_given(only_read, sizes, splits_sequence)
        for name, value in runtime_fields.items():
            setattr(self, name, value)


def _checked_fp8(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without fp8 its other fields say nothing; with it Megatron's recipe is "delayed" where none is given."""
    kind = arguments.get("fp8")
    if not kind:
        return {name: value for name, value in arguments.items() if not name.startswith("fp8")}
    if "fp8_recipe" not in arguments:
        raise ValueError(
            f"TransformerConfig: fp8={kind!r} without fp8_recipe is Megatron's delayed, which scales by largest "
            "values of steps before and is not here; give fp8_recipe='tensorwise'"
        )
    return arguments


# what is said in other words here
_LAYERS = (
    "give layers=range(...) of core.models.gpt.GPTModel, or layers=[range(...), ...] of gpt_stages"
)
_INIT_STD = (
    "give init_method_std: the model draws normal numbers; a layer of one's own takes init_method"
)
_OURS = {
    "init_method": _INIT_STD,
    "output_layer_init_method": _INIT_STD,
    "embedding_init_method": _INIT_STD,
    "window_size": "give windows, one per layer: of (127, 0) (128,) * num_layers",
    "recompute_modules": "call apply_recompute(model, ['mlp']) of core.autograd on the model",
    "cp_comm_type": "give initialize_model_parallel(cp_comm_type=...) of parallel_state",
    "num_layers_in_first_pipeline_stage": _LAYERS,
    "num_layers_in_last_pipeline_stage": _LAYERS,
    "pipeline_model_parallel_layout": _LAYERS,
}


def _not_here(unknown: list[str]) -> str:
    """Names, each with the field that it is nearly spelt like, and what to do."""
    known = sorted(_MODEL_FIELDS | _RUNTIME_DEFAULTS.keys() | SIZES.keys() | NO_EFFECT.keys())
    shown = []
    answers = []
    for name in unknown:
        near = [] if "=" in name else get_close_matches(name, known, n=1, cutoff=0.8)
        # other people's name of a model's field
        part, _, field = ELSEWHERE.get(name, "").partition(".")
        if part == "model" and field in _MODEL_FIELDS:
            near = [field]
        answer = _OURS.get(name, f"did you mean {near[0]}?" if near else "")
        answers.append(answer)
        shown.append(f"{name} ({answer})" if answer else name)
    told = f"TransformerConfig has no {', '.join(shown)} here"
    if all(answers):
        return told
    return (
        f"{told}; leave out what only says how Megatron computes. A model that needs "
        f"{'it' if len(unknown) == 1 else 'one of them'} would be another one here (docs/from_megatron.md)"
    )


# Megatron's, where they are not our own
_LATENT_DEFAULTS = {"q_lora_rank": 512, "normalization": "RMSNorm"}
_YARN_DEFAULTS: dict[str, Any] = {
    "rotary_scaling_factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


class MLATransformerConfig(TransformerConfig):
    """The same of latent attention. rope_type: "yarn" (the default) with Megatron's numbers, or "rope".

    Pairs that rotate are neighbours, as in Megatron's latent attention. Raises ValueError: another rope_type;
    cache_mla_latents.
    """

    def __init__(self, **arguments: Any) -> None:
        if "rotary_scaling" in arguments and "rope_type" not in arguments:
            # of `dataclasses.replace`, which gives all fields as they were made
            super().__init__(**arguments)
            return
        arguments = _LATENT_DEFAULTS | {"multi_latent_attention": True} | arguments
        kind = arguments.pop("rope_type", "yarn")
        scaling: dict[str, Any] = {}
        for name, default in _YARN_DEFAULTS.items():
            scaling[name] = arguments.pop(name, default)
        if kind not in ("rope", "yarn"):
            raise ValueError(
                f"MLATransformerConfig: rope_type={kind!r} is none of the 2: rope, yarn"
            )
        if arguments.pop("rotary_interleaved", False):
            raise ValueError(
                "MLATransformerConfig: rotary_interleaved=True turns pairs of pairs in Megatron's latent attention; "
                "leave it out, neighbours turn together"
            )
        if arguments.pop("cache_mla_latents", False):
            raise ValueError(
                "MLATransformerConfig: cache_mla_latents=True is not here, the cache of generation holds keys and "
                "values of heads; leave it out"
            )
        yarn = RotaryScaling(kind="yarn", factor=scaling.pop("rotary_scaling_factor"), **scaling)
        if kind == "yarn":
            arguments["rotary_scaling"] = yarn
        super().__init__(**arguments, rotary_interleaved=True)
        # Megatron scales scores by the factor with rope, too
        if kind == "rope" and self.softmax_scale is None and yarn.score_factor != 1:
            scale = self.head_size**-0.5 * yarn.score_factor
            object.__setattr__(self, "softmax_scale", scale)
