"""What a program has made of the `.grad` that it was shown: taken before an update, or added to by another backward.

Between the sum and the step `.grad` of a parameter is one of four: the gradient it was shown (perhaps fetched, and
changed), another parameter's (borrowed), a tensor of the program's own, or None.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.data_parallel.buffers.changes import ChangesByHand
from core.data_parallel.buffers.gradient import (
    BucketGradient,
    ParameterSlot,
    is_as_it_was,
    local_gradient_of,
    meet,
    store_gradient,
)
from core.parallel_state.layout import layout_of


def show(slots: Sequence[ParameterSlot]) -> None:
    """After the last sum: `.grad` of every parameter that has a gradient stands for it."""
    with torch._C.DisableTorchFunctionSubclass():
        for slot in slots:
            if slot.delivered and not slot.shown:
                slot.shown = True
                slot.parameter.grad = slot.gradient


def without_gradient(slots: Sequence[ParameterSlot]) -> list[str]:
    """The names of the parameters that have none, nor zeros that `zero_grad(set_to_none=False)` has left."""
    return [slot.name for slot in slots if not (slot.delivered or slot.zeroed)]


def take(slots: Sequence[ParameterSlot], changes: ChangesByHand, factor: float) -> bool:
    """Before an update: what the program has written into `.grad` is what counts; None is no gradient.

    factor: what a full gradient is multiplied by. Returns whether there are fewer or more gradients than before.
    All-gather of what is borrowed.
    """
    changed = False
    others = borrowed(slots)
    if others:
        meet([gradient.slot for _, gradient in others], "p.grad = q.grad")
    # all are gathered first: two parameters may have exchanged their gradients
    fulls = [(slot, gradient.slot.full_gradient()) for slot, gradient in others]
    for slot, full in fulls:
        _store_and_note(slot, changes, full, factor)
        slot.parameter.grad = slot.gradient
        slot.fetched, changed, slot.delivered = None, True, True
    with torch._C.DisableTorchFunctionSubclass():
        for slot in slots:
            gradient = slot.parameter.grad
            if type(gradient) is BucketGradient:
                _store_fetched(slot, changes, factor)
            elif gradient is not None:
                _store_and_note(slot, changes, gradient, factor)
                changed, slot.delivered = True, True
            elif slot.shown:
                changes.add(slot.index)
                local_gradient_of(slot).zero_()
                changed, slot.delivered, slot.zeroed = True, False, False
    return changed


def borrowed(slots: Sequence[ParameterSlot]) -> list[tuple[ParameterSlot, BucketGradient]]:
    """The parameters whose `.grad` was set to what another's is. Raises RuntimeError: to that of another step."""
    found = []
    with torch._C.DisableTorchFunctionSubclass():
        for slot in slots:
            gradient = slot.parameter.grad
            if type(gradient) is BucketGradient and gradient.slot is not slot:
                gradient.check_step()
                found.append((slot, gradient))
    return found


def go_on(slots: Sequence[ParameterSlot], changes: ChangesByHand) -> None:
    """Inside of a backward that comes after the sum: what still stands is in the buckets, as the program left it.

    Of None, and of tensors of the program's own, to which autograd has added or adds, nothing is left there. No
    collective. Nothing may be borrowed.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for slot in slots:
            if type(slot.parameter.grad) is BucketGradient:
                _store_fetched(slot, changes, 1.0)
            else:
                # to be done on all ranks alike
                if slot.shown:
                    changes.add(slot.index)
                slot.buffer.forget(slot.index)
                slot.shown = slot.delivered = slot.zeroed = False
            slot.fetched = None


def _store_fetched(slot: ParameterSlot, changes: ChangesByHand, factor: float) -> None:
    if slot.fetched is not None and not (factor == 1.0 and is_as_it_was(slot)):
        _store_and_note(slot, changes, slot.fetched, factor)


def _store_and_note(
    slot: ParameterSlot, changes: ChangesByHand, full: Tensor, factor: float
) -> None:
    # not of experts: other ranks hold others
    if "dp-cp" in layout_of(slot.parameter).gradient_groups:
        changes.add(slot.index)
        changes.add(full)
    store_gradient(slot, full, factor)
