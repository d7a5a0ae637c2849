"""Which sequences a context rank's rows were cut of: a fingerprint that its tokens carry, one on all ranks."""

import torch
from torch import Tensor

from core.parallel_state.by_hand.split_tensor import Call

# of a fingerprint; zeros: unknown
NUM_SEQUENCES = 2
SEQUENCES_REMEDY = (
    "Draw a batch from a seed of the data rank, which context ranks share: parallel_state.get_data_parallel_rank(); "
    "a seed of the global rank gives each other sequences"
)


def keep_sequences(call: Call) -> None:
    """A copy of rows, on another device say, is of the same sequences."""
    for x in call.inputs:
        sequences = getattr(x, "of_sequences", None)
        if (
            sequences is not None
            and isinstance(call.result, Tensor)
            and call.result.shape == x.shape
        ):
            call.result.of_sequences = sequences  # type: ignore[attr-defined]


def told_of_sequences(numbers: Tensor) -> str:
    """What is said where ranks have cut other sequences, [ranks, 2]; "" where one does not know."""
    if bool((numbers == 0).all(1).any()) or torch.allclose(numbers, numbers[:1], rtol=1e-9, atol=0):
        return ""
    return f"the {len(numbers)} context ranks cut their rows out of other sequences: each must have the same batch"
