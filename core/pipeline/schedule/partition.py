"""Layers to stages: contiguous runs whose costs are as equal as they can be. Standard library only."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class _Partial(NamedTuple):
    """The first stages over the first layers; compared in this order."""

    slowest: float
    sum_of_squares: float
    ends: tuple[int, ...]  # the layer after each stage


def partition(
    costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """The layers of each stage, at least one each: the slowest stage is as fast as possible, then the next.

    costs: of each layer, measured or estimated. first, last: of the embedding on the first stage and of the
    head on the last one, in the same unit.
    Raises ValueError: fewer layers than stages, a negative cost.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers do not fill {stages} stages with at least 1 each; use 1 to {layers} stages, or more "
            "layers"
        )
    if min(*costs, first, last) < 0:
        raise ValueError(f"costs must not be negative, got {min(*costs, first, last)}")
    cumulative = [0.0, *accumulate(costs)]

    def stage_cost(stage: int, begin: int, end: int) -> float:
        extra = 0.0
        if stage == 0:
            extra += first
        if stage == stages - 1:
            extra += last
        return cumulative[end] - cumulative[begin] + extra

    # dynamic programming: best[end] is the best way to put layers 0 .. end-1 into the stages so far
    best: list[_Partial | None] = [None] * (layers + 1)
    best[0] = _Partial(0.0, 0.0, ())
    for stage in range(stages):
        extended: list[_Partial | None] = [None] * (layers + 1)
        layers_for_later_stages = stages - stage - 1
        for end in range(stage + 1, layers - layers_for_later_stages + 1):
            options = []
            for begin in range(stage, end):
                shorter = best[begin]
                if shorter is None:
                    continue
                cost = stage_cost(stage, begin, end)
                slowest = max(shorter.slowest, cost)
                options.append(
                    _Partial(slowest, shorter.sum_of_squares + cost * cost, (*shorter.ends, end))
                )
            extended[end] = min(options)
        best = extended
    complete = best[layers]
    assert complete is not None
    return [
        range(begin, end) for begin, end in zip((0, *complete.ends), complete.ends, strict=False)
    ]


def even(layers: int, stages: int) -> list[range]:
    """The same number of layers per stage, as near as it goes."""
    return [
        range(stage * layers // stages, (stage + 1) * layers // stages) for stage in range(stages)
    ]
