"""Norms of gradients that are cut over ranks, tensor by tensor."""

import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from core.autograd.gradients import is_shown
from core.data_parallel.buffers.buffers import Buffer
from core.parallel_state.by_hand.functions import called_by_program, program_level
from core.parallel_state.collectives import Group, all_reduce
from core.parallel_state.layout import layout_of


class CutGradient(Protocol):
    """A gradient of which this rank has elements."""

    parameter: Parameter
    buffer: Buffer

    @property
    def divided_now(self) -> bool:
        """Whether each rank holds a shard of it."""
        ...

    def local_gradient(self) -> Tensor:
        """This rank's elements: 1-D."""
        ...


def global_norms(slots: Sequence[CutGradient], order: float) -> list[Tensor]:
    """Norms of full gradients in float64, from each rank's elements: as clip_grad_norm_ asks for them.

    Values must have been requested. One all-reduce per group.
    """
    ps = slots[0].buffer.ps
    norms = []
    for slot in slots:
        elements = slot.local_gradient()
        if elements.numel():
            norms.append(torch.linalg.vector_norm(elements.double(), order))
        else:
            norms.append(torch.zeros((), dtype=torch.float64, device=elements.device))
    # First over the data ranks that share a bucket, then over the ranks that share a matrix, or its experts.
    for axis in ("", "tp", "ep"):
        members: dict[int, tuple[Group, list[int]]] = {}
        for number, slot in enumerate(slots):
            if axis:
                group = None
                if axis in layout_of(slot.parameter).split:
                    group = ps.group(axis)
            else:
                group = slot.buffer.ranks if slot.divided_now else None
            if group is not None:
                members.setdefault(id(group), (group, []))[1].append(number)
        for group, numbers in members.values():
            combined = _combine_norms([norms[number] for number in numbers], order, group)
            for number, norm in zip(numbers, combined, strict=True):
                norms[number] = norm
    return norms


def _combine_norms(norms: Sequence[Tensor], order: float, group: Group) -> Tensor:
    """Norms of full tensors from the norms of each rank's elements: [n]."""
    stacked = torch.stack(list(norms))
    if order == float("inf"):
        return all_reduce(stacked, group, "max")
    total = all_reduce(stacked**order, group)
    if order == 2:
        return total.sqrt()
    return total ** (1 / order)


def warn_of_whole_norm(parameters: Sequence[Parameter]) -> None:
    """A program of Megatron's asks for the norm of one `main_grad`, which is of a rank's part there."""
    parameter = parameters[0]
    is_part = "tp" in layout_of(parameter).split
    is_read = len(parameters) == 1 and is_shown(getattr(parameter, "main_grad", None))
    if is_part and is_read and called_by_program(sys._getframe(2)):
        warnings.warn(
            "main_grad.norm() is that of the whole gradient, of all tensor and data ranks, and all of them call it "
            "together: one that calls it alone waits, and a sum over tensor ranks counts it once for each. In "
            "Megatron it is of a rank's part: main_grad.float().norm(). core.optimizer.get_grad_norm(parameters) is "
            "the model's",
            stacklevel=program_level(),
        )


class Scalings:
    """Tensors by which a program scales gradients of one model."""

    def __init__(self) -> None:
        self._last: weakref.ref[Tensor] | None = None
        self._told = False

    def hear(self, stages: int, factor: Tensor, count: int) -> None:
        """Of `count` gradients: one tensor for several is, on a pipeline, of a norm of some stages. Warns once."""
        of_several = count > 1 or (self._last is not None and self._last() is factor)
        self._last = weakref.ref(factor)
        if stages > 1 and of_several and not self._told:
            self._told = True
            warnings.warn(
                f"the gradients of 1 of {stages} pipeline ranks are scaled by a tensor: torch.nn.utils."
                "clip_grad_norm_ takes the norm of this rank's stages, and every rank scales by its own; "
                "OptimizerConfig(clip_grad=...) clips by the norm of the model, and step() returns it",
                stacklevel=program_level(),
            )
