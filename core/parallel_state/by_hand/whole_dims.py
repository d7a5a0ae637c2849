"""Whether a function of a weight goes along dims that no other rank holds a part of: then it is right on the part."""

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_functions import outcome_of
from core.parallel_state.layout import layout_of


def axes_of_parameter(parameter: Parameter) -> Axes:
    """Which dims of this rank's part tensor and expert ranks split."""
    split = layout_of(parameter).split
    return split_axes.of_dims(
        parameter.shape, {dim for axis, dim in split.items() if axis in ("tp", "ep")}
    )


def axes_of_result(
    parameter: Parameter, func: Any, name: str, args: tuple, kwargs: dict[str, Any], result: Any
) -> Axes | None:
    """Of what `func` made of `parameter`, or of its like; None where it took a part for the whole, or is unknown."""
    if not layout_of(parameter).split:
        return None
    try:
        outcome = outcome_of(func, name, args, kwargs, result)
    except Exception:
        # who looks on must not end a right program
        return None
    if isinstance(outcome, list) and len(outcome) == 1 and isinstance(outcome[0][0], Tensor):
        return outcome[0][1]
    return None
