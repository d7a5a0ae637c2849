"""The end of a backward that comes to a head of the program's own and not to the hidden states: these are frozen."""

from collections.abc import Callable

import torch
from torch import Tensor


class BackwardOfHead:
    """Of backward calls that come to several tensors of one head, or of several heads: when each has ended."""

    def __init__(self) -> None:
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
            tensor.register_hook(hear)
