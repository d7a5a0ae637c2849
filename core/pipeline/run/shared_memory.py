"""Memory that a stage shares with what is needed later: its inputs, which R reads again, and new gradients."""

from typing import Any

import torch
from torch import Tensor, nn

from core.parallel_state.collectives.p2p import version_of
from core.pipeline.run.messages.boundary import clone_tensor, flatten, tree_map, writable_view
from core.pipeline.run.microbatch import MicrobatchState


def write_counts(*values: Any) -> list[int]:
    """How often each tensor in `values` was written in place so far."""
    leaves, _ = flatten(values)
    return [version_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


class InputWrites:
    """A module may write into its inputs, as in one process; R, which runs it again, needs the originals."""

    def __init__(self) -> None:
        # whether the module does; None until tried
        self._writes: bool | None = None

    def inputs(self, state: MicrobatchState, batch: Any, will_recompute: bool) -> tuple[Any, Any]:
        """(what arrived, microbatch) as the module is called with them."""
        received = state.received
        if will_recompute and self._writes is not False:
            state.writable_copy = tree_map(clone_tensor, (received, batch))
            return state.writable_copy
        if isinstance(received, Tensor):
            return writable_view(received), batch
        return tree_map(writable_view, received), batch

    def notice(self, state: MicrobatchState) -> None:
        """After a first F that R will repeat: if the module wrote into its copy, later ones need copies as well."""
        if state.writable_copy is not None:
            self._writes = bool(self._writes) or any(write_counts(state.writable_copy))
            state.writable_copy = None


class NewGradients:
    """Parameters that had no `.grad` when the step began.

    Autograd may make a parameter's first `.grad` a view of an output gradient; the next microbatch would add into it,
    and so into what waits for W or is being sent. Parameters with main_grad have no .grad: the owner of main_grad
    takes the gradient.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._without: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter.grad is None:
                self._without.append(parameter)

    def unshare(self, needed_later: list[Tensor]) -> None:
        """Copy new `.grad`s that share memory with tensors needed later."""
        with_new_grad = [parameter for parameter in self._without if parameter.grad is not None]
        if not with_new_grad:
            return
        addresses = {tensor.untyped_storage().data_ptr() for tensor in needed_later}
        for parameter in with_new_grad:
            gradient = parameter.grad
            assert gradient is not None
            if (
                gradient.layout is torch.strided
                and gradient.untyped_storage().data_ptr() in addresses
            ):
                parameter.grad = gradient.clone()
        self._without = [parameter for parameter in self._without if parameter.grad is None]
