"""The staged path: an accelerator's tensors over gloo, through host memory.

NCCL refuses two ranks on one device, and gloo sends no tensor of an accelerator. On this path two ranks share one
device, with real kernels and streams: to prove a layout on one card, not to train fast.
"""

from typing import Protocol

import torch
from torch import Tensor


class _Pending(Protocol):
    def wait(self) -> Tensor: ...


def host_memory(x: Tensor) -> Tensor:
    """Contiguous host memory for what `x` holds, pinned where that is on an accelerator."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type != "cpu")


def to_host(x: Tensor) -> Tensor:
    """A contiguous copy in host memory. Waits for it: gloo reads it at once."""
    return host_memory(x).copy_(x)


class StagedCollective:
    """A collective under way in host memory; `wait()` copies its result into `target`, and returns that."""

    def __init__(self, pending: _Pending, target: Tensor) -> None:
        self._pending = pending
        self._target = target

    def wait(self) -> Tensor:
        """Wait for the result; the copy to the device runs on its stream."""
        return self._target.copy_(self._pending.wait(), non_blocking=True)
