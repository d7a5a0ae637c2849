"""The end of a backward that comes to a head of the program's own and not to the hidden states: these are frozen."""

from collections.abc import Callable

import torch
from torch import Tensor

from core.context_parallel.rows.synced import SyncedWeight


class BackwardOfHead:
    """Of backward calls that come to several tensors of one head, or of several heads: when each has ended."""

    def __init__(self, synced: SyncedWeight) -> None:
        self._synced = synced
        self._awaits_end = False

    def listen(self, tensor: Tensor, call: Callable[[Tensor], None]) -> None:
        """Call `call(gradient)`, once, at the end of a backward that comes to `tensor`, if any does."""

        def hear(gradient: Tensor) -> None:
            if not self._awaits_end:
                self._awaits_end = True
                torch.autograd.Variable._execution_engine.queue_callback(lambda: end(gradient))

        def end(gradient: Tensor) -> None:
            self._awaits_end = False
            call(gradient)

        if tensor.requires_grad:
            self._synced.choose_behind(tensor)
            tensor.register_hook(hear)
