"""What a step cannot be faster than: its own matmul and attention kernels, and its messages, each called bare."""

from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

KERNELS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product")
TAG = 7


class Kernels(TorchDispatchMode):
    """Remembers each matmul and attention kernel of what runs inside, with operands of its shapes.

    Calls alike share their operands, copies of those of the first one: attention's time depends on its values.
    """

    def __init__(self):
        super().__init__()
        self.calls, self._operands = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name().startswith(KERNELS):
            key = (func, str(tree_map_only(Tensor, _form, (args, kwargs))))
            if key not in self._operands:
                self._operands[key] = tree_map_only(Tensor, _copy, (args, kwargs))
            self.calls.append(key)
        return func(*args, **kwargs)

    def run(self):
        """All of them again, bare."""
        for key in self.calls:
            args, kwargs = self._operands[key]
            key[0](*args, **kwargs)


def _form(x):
    return tuple(x.shape), x.stride(), x.dtype


def _copy(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())


@contextmanager
def messages(group):
    """The sizes in bytes of what `group` carries inside, one number a collective."""
    sizes, add = [], group.traffic.add

    def adding(count, seconds):
        sizes.append(count)
        add(count, seconds)

    group.traffic.add = adding
    try:
        yield sizes
    finally:
        del group.traffic.add


def exchange(group, sizes):
    """Messages of these sizes to the other one of two ranks, and from it, with nothing around them."""
    process_group, peer = group.process_group, 1 - group.rank
    for size in sizes:
        sent, received = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        works = process_group.send([sent], peer, TAG), process_group.recv([received], peer, TAG)
        for work in works:
            work.wait()


def bound_of(step, group):
    """A function that does what `step` cannot do without: its kernels and, over two ranks, its messages."""
    step()
    with messages(group) as sizes, Kernels() as kernels:
        step()

    def bound():
        with torch.no_grad():
            kernels.run()
            exchange(group, sizes)

    return bound
