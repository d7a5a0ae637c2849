"""Layers to stages: contiguous runs whose costs are as equal as they can be. Standard library only."""

from collections.abc import Sequence
from itertools import accumulate


def partition(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[range]:
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
    until = [0.0, *accumulate(costs)]

    def cost(stage: int, begin: int, end: int) -> float:
        extra = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        return until[end] - until[begin] + extra

    # best[end]: (slowest stage, sum of squares, cuts) of the first stages over layers 0 .. end-1
    best: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (layers + 1)
    best[0] = (0.0, 0.0, ())
    for stage in range(stages):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            options = []
            for begin in range(stage, end):
                known = best[begin]
                if known is not None:
                    own = cost(stage, begin, end)
                    options.append((max(known[0], own), known[1] + own * own, (*known[2], end)))
            following[end] = min(options)
        best = following
    found = best[layers]
    assert found is not None
    ends = found[2]
    return [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]


def even(layers: int, stages: int) -> list[range]:
    """The same number of layers per stage, as near as it goes."""
    return [range(s * layers // stages, (s + 1) * layers // stages) for s in range(stages)]
