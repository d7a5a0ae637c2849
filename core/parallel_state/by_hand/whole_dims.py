"""Whether a function of a weight goes along dims that no other rank holds a part of: then it is right on the part."""

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_axes import Axes
from core.parallel_state.by_hand.split_functions import Finding, Followed, outcome_of
from core.parallel_state.layout import layout_of


def axes_of_parameter(parameter: Parameter) -> Axes:
    """Which dims of this rank's part tensor and expert ranks split."""
    split = layout_of(parameter).split
    return split_axes.of_dims(
        parameter.shape, {dim for axis, dim in split.items() if axis in ("tp", "ep")}
    )


# of a finding, the kind of function by hand
_KINDS = {"cut": "index", "draw": "draw", "reduction": "reduction"}


def are_rows_of_a_product(kind: str | None, made: Followed) -> bool:
    """Whether it is a part times a whole, for values alone: adapters that are merged."""
    return (
        kind == "product" and bool(made) and made[0][1] is not None and not made[0][0].requires_grad
    )


def result_of(
    parameter: Parameter, func: Any, name: str, args: tuple, kwargs: dict[str, Any], result: Any
) -> tuple[Followed, str | None]:
    """What `func` made of `parameter` or its like, with axes where they are known; or what kind of wrong it is."""
    if not layout_of(parameter).split:
        return [], None
    try:
        outcome = outcome_of(func, name, args, kwargs, result)
    except Exception:
        # who looks on must not end a right program
        return [], None
    if isinstance(outcome, Finding):
        return [], _KINDS.get(outcome.kind)
    if isinstance(outcome, list):
        return [(x, axes) for x, axes in outcome if isinstance(x, Tensor)], None
    return [], None
