"""Bytes of tensors that live: a dispatch mode that follows storages by weak reference."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class LiveBytes(TorchDispatchMode):
    """`live`: bytes of storages made inside this mode that still exist; `peak`: the most so far.

    `ignore` names tensors that are there anyway (parameters, gradients, a stage's input).
    """

    def __init__(self, *ignore):
        super().__init__()
        self.live = self.peak = 0
        self._seen = {}
        for tensor in ignore:
            self._add(tensor)
        self.live = self.peak = 0
        self._ignored = {t.untyped_storage()._cdata for t in ignore}

    def _add(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._seen.get(key)
        if (known is not None and known() is not None) or size <= 8 or not storage.data_ptr():
            return  # seen before, a single number, a tensor without a value

        def dead(_):
            if self._seen.pop(key, None) is not None and key not in self._ignored:
                self.live -= size

        self._seen[key] = weakref.ref(storage, dead)
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return out


def _addmm_(into, a, b, *args, out_val=None, **kwargs):
    """torch's counter takes its in-place form for nothing."""
    return 2 * a[0] * a[1] * b[1]


def matmul_flops():
    """A FlopCounterMode that counts `addmm_` too."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_})
