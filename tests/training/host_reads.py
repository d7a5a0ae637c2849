"""Counts how often a program reads values of tensors, where on an accelerator the host would wait for the device.

The CPU stands for the accelerator: `core` asks `reading_waits` in one place, which says here what it would say there.
"""

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from core.parallel_state import environment

ROOT = Path(__file__).parents[2]
READS = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__bool__),
    *(torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.nonzero),
    *(torch.nonzero, torch.equal, torch.Tensor.equal, torch.allclose, torch.masked_select),
}
# Of tensors that are in host memory by construction, also where the device is an accelerator.
ON_HOST = {
    "core/pipeline/run/messages/channel.py _receive_form",  # forms travel over gloo
    "core/autograd/bag.py object_of",  # the number of a ticket
    "core/autograd/recomputation/module_state.py same_random_state",  # states of generators
    "core/parallel_state/environment.py read",  # HostCopy: an event of its own
}


def _caller():
    """The innermost line of this repository, outside of this file: "file function"."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        is_installed = "site-packages" in path.parts  # an environment may lie in the repository
        if path.is_relative_to(ROOT) and not is_installed and path.name != Path(__file__).name:
            return f"{path.relative_to(ROOT)} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"


class _Calls(TorchFunctionMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.found[_caller()] += 1
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """What autograd and torch's own Python do is seen here only."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found[_caller()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_an_accelerator():
    """Inside, `reading_waits` is True of a CPU; a function keeps its identity, whoever imported it."""
    plain = environment.reading_waits.__code__
    environment.reading_waits.__code__ = (lambda device: True).__code__
    try:
        yield
    finally:
        environment.reading_waits.__code__ = plain


@contextmanager
def host_reads():
    """Yields a Counter: "file function" -> how often it read a tensor's values inside."""
    found = Counter()
    with ExitStack() as stack:
        stack.enter_context(_Calls(found))
        stack.enter_context(_Operations(found))
        yield found
    for place in ON_HOST:
        found.pop(place, None)
