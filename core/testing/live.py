"""Bytes of live tensors, on any device: a dispatch mode that follows storages by weak reference."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# bytes: storages of at most this size are single numbers and not counted
SCALAR = 8


class LiveBytes(TorchDispatchMode):
    """Counts the storages made inside this mode, and those it was told of, each once however many views it has.

    A storage counts with its size of the moment: `storage.resize_(0)` gives its memory back, and later it may have
    some again. Storages of at most 8 bytes and tensors without memory (meta) count nothing.

    ignore: tensors that are there anyway (parameters, gradients, a stage's input).
    """

    def __init__(self, *ignore: Tensor) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}  # as last seen
        self._refs: dict[int, weakref.ref] = {}
        self._ignored: dict[int, weakref.ref] = {}
        self._total = self._peak = 0
        for tensor in ignore:
            storage = tensor.untyped_storage()
            self._ignored[storage._cdata] = weakref.ref(storage, self._forget)

    def _forget(self, ref: weakref.ref) -> None:
        self._ignored = {
            key: ref_kept for key, ref_kept in self._ignored.items() if ref_kept is not ref
        }

    def follow(self, *tensors: Tensor) -> "LiveBytes":
        """Count these too: tensors from before, or of a storage that was ignored. Returns the probe."""
        for tensor in tensors:
            self._ignored.pop(tensor.untyped_storage()._cdata, None)
            self._count(tensor)
        _ = self.live
        return self

    @property
    def live(self) -> int:
        """Bytes of tensors that are alive now."""
        for key, ref in list(self._refs.items()):
            storage = ref()
            if storage is not None:
                self._update_size(key, storage)
        self._peak = max(self._peak, self._total)
        return self._total

    @property
    def peak(self) -> int:
        """The most bytes at the end of an operation inside the mode, or when `live` was asked for."""
        return max(self._peak, self.live)

    def reset_peak(self) -> None:
        """Start the peak again from what is alive now."""
        self._peak = 0
        self._peak = self.live

    def _update_size(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes() if storage.device.type != "meta" else 0
        size = size if size > SCALAR else 0
        self._total += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored:
            return
        existing_ref = self._refs.get(key)
        if existing_ref is None or existing_ref() is None:

            def forget_storage(ref: weakref.ref) -> None:
                # and not another storage, which got its address
                if self._refs.get(key) is ref:
                    del self._refs[key]
                    self._total -= self._sizes.pop(key)

            self._total -= self._sizes.pop(key, 0)
            self._refs[key] = weakref.ref(storage, forget_storage)
        self._update_size(key, storage)

    def __torch_dispatch__(
        self,
        func: Callable,
        types: Iterable,
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        # sizes may have changed since they were last read: read all
        if self._total > self._peak:
            _ = self.live
        return out


def live_bytes(*existing: Tensor, ignore: Iterable[Tensor] = ()) -> LiveBytes:
    """A probe that counts `existing` tensors and whatever is made inside `with` it, but not `ignore`."""
    return LiveBytes(*ignore).follow(*existing)
