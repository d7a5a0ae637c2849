"""Megatron's seeds: one call, and regions whose random numbers differ between tensor ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from core.parallel_state import current_state, mix32, seeded


def model_parallel_cuda_manual_seed(seed: int, *unused: Any, **more: Any) -> None:
    """`torch.manual_seed`: GPTModel takes its initial weights from it, and its dropout knows the ranks by itself."""
    torch.manual_seed(seed)


class CudaRNGStatesTracker:
    """Regions of a user's own where each tensor rank draws other numbers."""

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Inside, numbers are drawn from this rank's seed, which comes from torch's CPU generator."""
        ps = current_state()
        # torch's CPU generator moves on alike on all ranks, so that each region has a new seed
        drawn = int(torch.randint(2**31, (), device="cpu"))
        with seeded(ps.device, mix32(drawn, name, ps.index("tp"))):
            yield


def get_cuda_rng_tracker(*unused: Any, **more: Any) -> CudaRNGStatesTracker:
    """The tracker; it has no state of its own."""
    return CudaRNGStatesTracker()


def checkpoint(function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
    """Run again in backward. Raises ValueError: distributed activations (sequence parallelism divides them)."""
    if distribute_saved_activations:
        raise ValueError(
            "distribute_saved_activations=True is not here: use sequence_parallel=True, which divides them"
        )
    return torch_checkpoint(function, *args, use_reentrant=False)
