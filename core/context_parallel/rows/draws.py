"""Noise for hidden states, drawn by each context rank for its own rows (NEFTune's hook on the embedding)."""

from torch import Tensor

# what stands for a tensor that was made like rows, and holds no noise yet
MADE_LIKE = "made like"
REMEDY = (
    "Draw for whole sequences, with one seed, and cut: ContextRows.of_state(ps).of(noise, dim); or give each rank a "
    "generator of its own, and take lengths from the batch before it was cut"
)


def message(name: str, rows: Tensor) -> str:
    """What a function draws."""
    return (
        f"{name} draws for {list(rows.shape)}, rows which are this context rank's: ranks that are seeded alike draw "
        "the same for other rows, and a length read from it is of these rows"
    )
