"""Noise for hidden states, drawn by each context rank for its own rows (NEFTune's hook on the embedding)."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_tensor import SplitTensor

# what stands for a tensor that was made like rows, and holds no noise yet
MADE_LIKE = "made like"
REMEDY = (
    "Draw for whole sequences, with one seed, and cut: ContextRows.of_state(ps).of(noise, dim); or draw from a "
    "generator of its own on each rank, and take lengths from the batch before it was cut"
)


def has_rows(made: Any, sources: Iterable[SplitTensor]) -> bool:
    """Whether what was made like followed rows has an entry for each; [1, b, h] is for samples."""
    return isinstance(made, Tensor) and any(
        made.dim() != x.dim() or made.shape[dim] == x.shape[dim]
        for x in sources
        for dim in split_axes.split_dims(x.axes)
    )


def message(name: str, rows: Tensor) -> str:
    """What a function draws."""
    return (
        f"{name} draws for {list(rows.shape)}, rows which are this context rank's: ranks that are seeded alike draw "
        "the same for other rows, and a length read from it is of these rows"
    )
