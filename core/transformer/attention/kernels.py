"""Which kernels a run uses where torch has several: attention's by a stated priority, deterministic ones if asked."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# fastest first: cuDNN on sm_90 and newer, FlashAttention elsewhere; the last one takes every mask and dtype
PRIORITY = {
    "cuda": (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    )
}


def use_deterministic() -> None:
    """For the rest of the process: operations that give the same bits from run to run, or raise."""
    # read when cuBLAS starts
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@contextmanager
def kernels_of_run(device: torch.device, *, deterministic: bool = False) -> Iterator[None]:
    """Inside, attention tries its kernels in the order of `PRIORITY` (of CUDA; elsewhere torch's own order).

    deterministic: the same bits from run to run: gradients of embeddings are added in one order, attention's backward
    is a deterministic one (cuDNN's is not, and is left out by torch). Raises RuntimeError, in a step: an operation
    without a deterministic form. It costs speed.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with ExitStack() as stack:
        if device.type in PRIORITY:
            stack.enter_context(sdpa_kernel(list(PRIORITY[device.type]), set_priority=True))
        if deterministic:
            use_deterministic()
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
