"""What a program does with gradients by hand: scaled, clamped, with something added, or added to weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from core.parallel_state.by_hand.functions import function_name
from core.parallel_state.by_hand.heard import Heard
from core.parallel_state.environment import reading_waits

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
# soft limits
_CLAMPS |= {
    "tanh",
    "atan",
    "arctan",
    "erf",
    "sigmoid",
    "softsign",
    "hardtanh",
    "softshrink",
    "hardshrink",
}
_SIGNS = {"sign", "sgn"}
_COMPARISONS = {"lt", "gt", "le", "ge"}
_ADDITIONS = {"add", "sub", "iadd", "isub", "foreach_add", "foreach_sub"}


@dataclass(frozen=True)
class Change:
    """kind: "scaled" by numbers, "clamped", "added" to, "applied": added to the weight itself; "compared", "signed".

    factor: of a scaling or an update, where that is known without waiting for a device; with what it is compared; of
    what is added, its first element over the second.
    """

    kind: str
    factor: float | None = None


def heard_change(
    func: Any, sources: Sequence[Heard], values: Sequence[Any], *, is_first: bool, alpha: Any
) -> Heard | None:
    """What is heard of a function that changes a gradient, or adds to a weight; see `_change_of_gradient`."""
    name = function_name(func)
    is_of_weights = not any(source.of_gradient or source.of_state for source in sources)
    if name in _ADDITIONS and is_of_weights and _is_of(sources[0], values):
        return replace(sources[0], kind="added", name=name, factor=_ratio_of_first(values[1:]))
    change = _change_of_gradient(func, sources, values, is_first=is_first, alpha=alpha)
    if change is None:
        return None
    heard = replace(sources[0], of_gradient=True, kind=change.kind, factor=change.factor)
    return replace(heard, name=name)


def _change_of_gradient(
    func: Any,
    sources: Sequence[Heard],
    values: Sequence[Any],
    *,
    is_first: bool,
    alpha: Any = 1.0,
) -> Change | None:
    """What is done with gradients; None where none is changed, used for an update, or made into a new one.

    sources: whose values the function was given, in the order of `values`, its arguments; is_first: the first of
    these is a gradient; alpha: what an addition multiplies by.
    """
    name = function_name(func)
    gradients = [source for source in sources if source.of_gradient]
    if not gradients:
        return None
    if name in _CLAMPS:
        return Change("clamped")
    if name in _SIGNS:
        return Change("signed")
    if name in _SCALINGS and all(map(_is_number, values[1:])):
        return Change("scaled", _factor_of(name, values[1:]))
    if name == "zero":
        return Change("scaled", 0.0)
    if name in _COMPARISONS and isinstance(values[-1], float):
        return Change("compared", values[-1])
    if name not in _ADDITIONS:
        return None
    if not is_first and _is_of(gradients[0], values):
        return Change("applied", _factor_of(name, [alpha]))
    # `momentum.add(gradient)` changes no gradient, `gradient + decay * weight` makes a new one
    is_new = len(gradients) < len(sources) and not func.__name__.endswith("_")
    if is_new or (is_first and func.__name__.endswith("_")):
        return Change("added", _ratio_of_first(values[1:]))
    return None


def _ratio_of_first(values: Sequence[Any]) -> float | None:
    """Of the first tensor's first two elements: draws of one seed have the same, whatever their deviation."""
    first = next((x[0] if isinstance(x, (list, tuple)) else x for x in values), None)
    if not isinstance(first, Tensor) or first.numel() < 2 or reading_waits(first.device):
        return None
    a, b = first.detach().reshape(-1)[:2].tolist()
    # constants are no draws
    return a / b if b and a != b else None


def _is_of(gradient: Heard, values: Sequence[Any]) -> bool:
    """Whether the first value is the parameter, or an alias of it."""
    first = values[0] if values else None
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    return (
        isinstance(first, Tensor)
        and first.numel() > 0
        and first.data_ptr() == gradient.parameter.data_ptr()
    )


def _factor_of(name: str, values: Sequence[Any]) -> float | None:
    factor = 1.0
    for value in values:
        is_read = isinstance(value, Tensor) and not reading_waits(value.device)
        if not (is_read or isinstance(value, (int, float))):
            return None
        factor *= float(value)
    if "div" not in name:
        return factor
    return 1 / factor if factor else None


def _is_number(value: Any) -> bool:
    """One factor for all elements; of a list of gradients also one for each."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return not isinstance(value, Tensor) or value.numel() == 1
