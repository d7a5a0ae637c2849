"""Noise for hidden states, drawn by each context rank for its own rows (NEFTune's hook on the embedding)."""

from torch import Tensor

from core.parallel_state.by_hand.split_names import kind_of

# what stands for a tensor that was made like rows, and holds no noise yet
MADE_LIKE = "made like"
REMEDY = (
    "Draw for whole sequences, with one seed, and cut: ContextRows.of_state(ps).of(noise, dim); or give each rank a "
    "generator of its own, and take lengths from the batch before it was cut"
)


def draws(name: str) -> bool:
    """Whether a function of torch's makes random numbers."""
    return kind_of(name) == "draw"


def message(name: str, rows: Tensor) -> str:
    """What a function draws."""
    return (
        f"{name} draws for {list(rows.shape)}, rows which are this context rank's: ranks that are seeded alike draw "
        "the same for other rows, and a length read from it is of these rows"
    )
