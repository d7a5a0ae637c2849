"""What a program changes of gradients by hand: scaled, clamped, or with something added."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from core.parallel_state.by_hand.functions import function_name
from core.parallel_state.by_hand.heard import Heard

_SCALINGS = {
    "mul",
    "div",
    "truediv",
    "imul",
    "itruediv",
    "multiply",
    "divide",
    "foreach_mul",
    "foreach_div",
}
_CLAMPS = {"clamp", "clip", "clamp_min", "clamp_max", "foreach_clamp_min", "foreach_clamp_max"}
_ADDITIONS = {"add", "sub", "iadd", "isub", "foreach_add", "foreach_sub"}


def change_of_gradient(func: Any, sources: Sequence[Heard], values: Sequence[Any]) -> str | None:
    """ "scaled" by numbers, "clamped", "added" to; None where no gradient is changed, or made into a new one.

    sources: whose values the function was given, in the order of `values`, its arguments.
    """
    name = function_name(func)
    gradients = [source for source in sources if source.of_gradient]
    if not gradients:
        return None
    if name in _CLAMPS:
        return "clamped"
    if name in _SCALINGS and all(map(_is_number, values[1:])):
        return "scaled"
    # `momentum.add(gradient)` changes no gradient, `gradient + decay * weight` makes a new one
    in_place = func.__name__.endswith("_") and sources[0].of_gradient
    if name in _ADDITIONS and (in_place or len(gradients) < len(sources)):
        return "added"
    return None


def _is_number(value: Any) -> bool:
    """One factor for all elements; of a list of gradients also one for each."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return not isinstance(value, Tensor) or value.numel() == 1
