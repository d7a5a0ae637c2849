"""Tensors that a program took out of parameters before they were laid into buckets: they do not follow any more."""

import gc
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives.checks import checksum

# to a parameter's memory: its tensor's, and that of the Python object we ask
_OWN_REFERENCES = 2


class KeptMemory:
    """Remembers, weakly, the memory that parameters leave where somebody else holds it (`p.data`, `p.detach()`, a
    state_dict). To be made before the parameters get other memory.
    """

    def __init__(self, names: Mapping[Parameter, str]) -> None:
        self._held: list[tuple[str, StorageWeakRef]] = []
        for parameter, name in names.items():
            if parameter.is_meta or parameter.layout is not torch.strided or not parameter.numel():
                continue
            storage = parameter.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) > _OWN_REFERENCES:
                self._held.append((name, StorageWeakRef(storage)))

    def look(self) -> None:
        """Before the first update: warns if somebody still holds the memory that was left, and no update reaches."""
        held, self._held = self._held, []
        if any(_is_there(reference) for _, reference in held):
            gc.collect()
        names = [name for name, reference in held if _is_there(reference)]
        if names:
            rest = f" and {len(names) - 1} more" if names[1:] else ""
            warnings.warn(
                f"{names[0]}{rest}: tensors that were taken before DataParallel was made (p.data, p.detach(), a "
                "view, a state_dict) keep the values of then, and what is written there does not reach the weights, "
                "whose values lie in its buckets; take them anew after it is made, or p.detach().clone() of what is "
                "to stay",
                stacklevel=program_level(),
            )


class ReplacedData:
    """Remembers, weakly, the tensors that a program put in the place of parameters' data, by name.

    Their values were copied into the bucket; in torch they are the weights themselves from then on.
    """

    def __init__(self) -> None:
        # who has the memory, as what, and the values that were copied
        self._held: dict[str, tuple[StorageWeakRef, Tensor, int]] = {}

    def add(self, name: str, data: Tensor) -> None:
        """`data` was copied, and is let go of."""
        shape_only = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device="meta")
        where = shape_only.as_strided(data.shape, data.stride(), data.storage_offset())
        self._held[name] = StorageWeakRef(data.untyped_storage()), where, int(checksum(data))

    def look(self) -> None:
        """Before an update: warns if somebody who still holds one has written to it since."""
        for name, (reference, where, values) in list(self._held.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._held[name]
                continue
            data = torch.empty(0, dtype=where.dtype, device=storage.device)
            data.set_(storage, where.storage_offset(), where.shape, where.stride())
            if int(checksum(data)) != values:
                self._held = {}
                warnings.warn(
                    f"{name}: the tensor that was put in the place of its data (p.data = x) was written to since, "
                    "by whoever holds it (a flat vector of all weights, another parameter's data, a model's twin): "
                    "its values of then were copied into DataParallel's buckets, and no later ones reach them. "
                    "Write p.copy_(x) under no_grad each time; tie two weights as one Parameter, before DataParallel "
                    "is made",
                    stacklevel=program_level(),
                )
                return


def _is_there(reference: Any) -> bool:
    return not reference.expired()
