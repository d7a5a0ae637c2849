"""Named ranges in a profiler's trace: which action of a step the kernels under them belong to."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function

_NOTHING = nullcontext()


def profiled() -> bool:
    """Whether a profiler of torch's listens in this thread (a trace, or NVTX ranges)."""
    return torch.autograd._profiler_enabled()


def named(name: str) -> AbstractContextManager[Any]:
    """A range of this name around a block; nothing where nobody profiles."""
    if profiled():
        return record_function(name)
    return _NOTHING
