"""How many bytes a stage keeps for its backward: counted in one step, for the automatic schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from core.autograd import WeightGradBag


class MemoryProbe:
    """Bytes that a stage keeps for backward, counted once per storage; its parameters are left out, and the
    microbatch: a view of the batch, which the caller holds anyway."""

    def __init__(self, module: nn.Module, microbatch: Any = None) -> None:
        given = [leaf for leaf in pytree.tree_leaves(microbatch) if isinstance(leaf, Tensor)]
        own = (*module.parameters(), *module.buffers(), *given)
        self._own = {t.untyped_storage().data_ptr() for t in own}
        self._seen: dict[int, int] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor."""
        if is_traceable_wrapper_subclass(tensor):  # nested ones, DTensors: no memory of their own
            for name in tensor.__tensor_flatten__()[0]:
                self.keep(getattr(tensor, name))
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        """What was counted."""
        return sum(self._seen.values())

    def watching(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Inside this context autograd's saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor)


@dataclass
class StageMemory:
    """Bytes of one stage and microbatch: `saved` by F when an R follows, by a `graph`, `waiting` between I and W."""

    saved: int = 0
    graph: int = 0
    waiting: int = 0

    def see_graph(self, probe: MemoryProbe, received: Sequence[Tensor]) -> None:
        """After the forward that made a graph; the stage's input belongs to it."""
        inputs = MemoryProbe(nn.Module())
        for tensor in received:
            probe.keep(tensor)
            inputs.keep(tensor)
        self.saved, self.graph = inputs.bytes, probe.bytes

    def see_bag(self, bag: WeightGradBag, probe: MemoryProbe) -> None:
        """After I."""
        for tensor in bag.tensors():
            probe.keep(tensor)
        self.waiting = probe.bytes
