"""Weights and masks by position, which a program made of each context rank's rows alike.

`losses * torch.arange(losses.shape[1])` counts from 0 on every rank, though each holds other rows of the sequences.
Numbers that differ from row to row are the same on all ranks for this reason, and hardly ever for another.
"""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_tensor import SplitTensor
from core.parallel_state.collectives.checks import fingerprint

# of one backward: how many are compared, each by two numbers
MAX_FACTORS = 4
_WEIGHTS = ("mul", "imul", "rmul", "div", "truediv", "idiv", "itruediv", "matmul", "mv", "dot")
# here only bool tensors choose rows by their place; numbers of rows are judged where they are used
_CHOICES = ("where", "masked_fill", "masked_select", "getitem", "setitem")

REMEDY = (
    'Take the rows\' numbers from batch["position_ids"] of context_batch, or make the weights for whole sequences '
    "[b, s] and cut them: ContextRows.of_state(ps).of(weights, 1)"
)


class RowFactors:
    """Notes the plain tensors by which followed rows are multiplied or chosen."""

    def __init__(self, device: torch.device) -> None:
        # two numbers of each; 0 where it is the same for all rows
        self.numbers = torch.zeros(2 * MAX_FACTORS, dtype=torch.float64, device=device)
        self._count = 0

    @torch.no_grad()
    def note(self, name: str, inputs: list[SplitTensor], args: tuple, kwargs: dict) -> None:
        """A function of followed rows."""
        if name not in _WEIGHTS and name not in _CHOICES:
            return
        sizes = {x.shape[dim] for x in inputs for dim in _row_dims(x)}
        for factor in pytree.tree_leaves((args, kwargs)):
            if type(factor) is not Tensor or self._count == MAX_FACTORS:
                continue
            if name in _CHOICES and factor.dtype is not torch.bool:
                continue
            dim = next((dim for dim, n in enumerate(factor.shape) if n > 1 and n in sizes), None)
            if dim is not None:
                first = 2 * self._count
                varies = (factor != factor.narrow(dim, 0, 1)).any()
                self.numbers[first : first + 2] = fingerprint(factor.double()) * varies
                self._count += 1


def _row_dims(x: SplitTensor) -> list[int]:
    """The dims that are split, or hold rows among others after a view."""
    return [dim for dim in range(len(x.axes)) if split_axes.is_split(x.axes, [dim])]


def told_of_factors(numbers: Tensor) -> str:
    """What is said where two ranks multiply by the same; "" if nothing. numbers: [ranks, 2 * MAX_FACTORS]."""
    pairs = numbers.view(len(numbers), MAX_FACTORS, 2)
    is_same = ((pairs == pairs[:1]) & pairs.isfinite()).all(2).all(0)
    if not bool((is_same & (pairs[0, :, 0] != 0)).any()):
        return ""
    return (
        f"rows are weighted or chosen by numbers that differ from row to row and are the same on all {len(numbers)} "
        "context ranks, which hold other rows of the sequences: made by `torch.arange(s)`, they count from each "
        "rank's first row"
    )
