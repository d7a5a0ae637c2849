"""Tensors that a program took out of parameters before they were laid into buckets: they do not follow any more."""

import gc
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

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
                stacklevel=4,
            )


def _is_there(reference: Any) -> bool:
    return not reference.expired()
