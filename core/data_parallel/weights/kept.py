"""Tensors that a program took out of parameters before they were laid into buckets: what it writes there is lost."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from core.parallel_state.collectives.checks import checksum

# to a parameter's memory: its tensor's, and that of the Python object we ask
_OWN_REFERENCES = 2


class KeptMemory:
    """Remembers, weakly, the memory that parameters leave where somebody else holds it (`p.data`, `p.detach()`, a
    state_dict), and its checksum. To be made before the parameters get other memory.
    """

    def __init__(self, names: Mapping[Parameter, str]) -> None:
        self._held: list[tuple[str, StorageWeakRef, Any, Tensor]] = []
        for parameter, name in names.items():
            if parameter.is_meta or parameter.layout is not torch.strided or not parameter.numel():
                continue
            storage = parameter.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) > _OWN_REFERENCES:
                where = (
                    parameter.shape,
                    parameter.stride(),
                    parameter.storage_offset(),
                    parameter.dtype,
                )
                self._held.append((name, StorageWeakRef(storage), where, checksum(parameter)))

    def look(self, step: int) -> None:
        """In steps 1, 2, 4, 8 ...: warns, once, if the memory that was left has been written since."""
        if not self._held or step & (step - 1):
            return
        written = []
        for name, reference, (shape, strides, offset, dtype), before in self._held:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                now = torch.empty(0, dtype=dtype, device=storage.device).set_(
                    storage, offset, shape, strides
                )
                if not torch.equal(checksum(now), before):
                    written.append(name)
        if written:
            self._held = []
            warnings.warn(
                f"{written[0]} and {len(written) - 1} more: tensors that were taken before DataParallel was made "
                "(p.data, p.detach(), a state_dict) have been written to, which no longer reaches the parameters: "
                "their values lie in its buckets now; take them anew after it is made",
                stacklevel=4,
            )
