"""Which of a model's layers multiply 8-bit factors, and rules about it: functions of a configuration's fields."""

from collections.abc import Iterator
from typing import Any

# a TransformerConfig, whose file imports this one
Precision = Any

# hybrid: output gradients in e5m2, activations and weights in e4m3
FP8_FORMATS = ("e4m3", "hybrid")
FP8_RECIPES = ("tensorwise", "rowwise")
_RECIPES_ELSEWHERE = {
    "delayed": "Transformer Engine scales by the largest values of steps before",
    "blockwise": "DeepSeek-V3 scales blocks of 128",
    "mxfp8": "blocks of 32 have scales of 8 bits",
}
# fields of a TransformerConfig about 8 bits, all of them settings of a run and no facts of its model
FP8_FIELDS = (
    "fp8",
    "fp8_recipe",
    "fp8_wgrad",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)
_ENDS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def fp8_rules(config: Precision) -> Iterator[tuple[bool, str]]:
    """(holds, message) of the fields about 8 bits."""
    kind = config.fp8
    recipe = config.fp8_recipe
    yield (
        kind is None or kind in FP8_FORMATS,
        f"unknown fp8 {kind!r}; known: {', '.join(FP8_FORMATS)}, or None for none",
    )
    yield (
        recipe in FP8_RECIPES,
        f"fp8_recipe={recipe!r} is none of {', '.join(FP8_RECIPES)}, which scale by the present largest value"
        + (f" ({_RECIPES_ELSEWHERE[recipe]})" if recipe in _RECIPES_ELSEWHERE else "")
        + "; use tensorwise",
    )
    for name, default in (
        ("fp8_recipe", "tensorwise"),
        ("fp8_wgrad", True),
        ("first_last_layers_bf16", False),
    ):
        value = getattr(config, name)
        yield (
            kind is not None or value == default,
            f"{name}={value} is of 8-bit products, and fp8=None has none; give fp8=hybrid, or leave {name} out",
        )
    for name in _ENDS:
        count = getattr(config, name)
        yield count >= 0, f"{name}={count} must not be negative"
        yield (
            config.first_last_layers_bf16 or count == 1,
            f"{name}={count} says how many layers first_last_layers_bf16=False leaves out of fp8; give "
            f"first_last_layers_bf16=True, or leave {name} out",
        )
    if kind is not None and config.first_last_layers_bf16:
        start, end = (getattr(config, name) for name in _ENDS)
        yield (
            start + end < config.num_layers,
            f"{_ENDS[0]}={start} and {_ENDS[1]}={end} leave fp8={kind} none of num_layers={config.num_layers}; use "
            "fewer, or leave fp8 out",
        )


def in_8_bits(config: Precision, layer: int) -> bool:
    """Whether the linears of layer `layer` (a global number; -1 outside of layers) multiply 8-bit factors.

    Linears of attention and MLP, and experts; not embedding, router, output layer, adapters of LoRA.
    """
    if config.fp8 is None or layer < 0:
        return False
    if not config.first_last_layers_bf16:
        return True
    end = config.num_layers - config.num_layers_at_end_in_bf16
    return bool(config.num_layers_at_start_in_bf16 <= layer < end)
