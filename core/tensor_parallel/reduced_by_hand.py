"""Notices parameters that a program's own `reduce_from_tensor_region` leaves with a part of their gradient.

Each tensor rank computes some experts, heads or columns, and the sum of all goes on. What all ranks hold alike before
that, a router say, gets on each rank the gradient of that rank's part; `copy_to_tensor_region` sums it in backward.
Without it these parameters move apart at the first update. Nothing else shows it: a program may sum such gradients by
hand, which is right.
"""

import warnings
import weakref

import torch
from torch import Tensor, nn

from core.autograd.graph import nodes_behind
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import Group, all_gather_objects
from core.parallel_state.collectives.checks import checksum
from core.parallel_state.layout import layout_of
from core.tensor_parallel.differences import has_full_memory

# calls in which new parameters are looked for; in each call whose number is a power of two all are compared
_FIRST = 8

# shape, and the sum of the bits
_Key = tuple[tuple[int, ...], int]


class ReducedByHand:
    """Of one group of tensor ranks: parameters that stand before sums which the program makes itself."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._calls = 0
        self._told = False
        # by their values when they were first met: the same key on each rank that held them alike
        self._parameters: dict[_Key, weakref.ref[nn.Parameter]] = {}

    @torch.no_grad()
    def meet(self, part: Tensor) -> None:
        """Before a sum over the group, of `part` of each rank; every rank calls it. Warns once, on all ranks."""
        self._calls += 1
        is_turn = self._calls & (self._calls - 1) == 0
        if self._told or (self._calls > _FIRST and not is_turn):
            return
        if part.requires_grad:
            self._note(part)
        values = {}
        for key, reference in self._parameters.items():
            parameter = reference()
            if parameter is not None and has_full_memory(parameter):
                values[key] = _key(parameter)
        of_ranks = all_gather_objects(values, self._group)
        for key, value in of_ranks[0].items():
            others = [rank.get(key) for rank in of_ranks[1:]]
            if None not in others and any(other != value for other in others):
                self._told = True
                self._tell(key)
                return

    def _note(self, part: Tensor) -> None:
        """The trained parameters behind `part` that this rank holds as the others may."""
        known = {id(reference()) for reference in self._parameters.values()}
        for node in nodes_behind([part.grad_fn]):
            leaf = getattr(node, "variable", None)
            if not isinstance(leaf, nn.Parameter) or id(leaf) in known:
                continue
            if "tp" in layout_of(leaf).split or not has_full_memory(leaf) or not leaf.numel():
                continue
            # of ones or zeros every rank's own are alike
            if leaf.min() < leaf.max():
                self._parameters[_key(leaf)] = weakref.ref(leaf)

    def _tell(self, key: _Key) -> None:
        reference = self._parameters.get(key)
        parameter = reference() if reference is not None else None
        of_shape = f"of shape {list(parameter.shape)} " if parameter is not None else ""
        warnings.warn(
            f"a parameter {of_shape}was the same on tensor ranks {list(self._group.ranks)} and differs after an "
            "update. It stands before reduce_from_tensor_region, and each rank's gradient is of its own part: "
            "core.tensor_parallel.copy_to_tensor_region(x, group) sums it, around each input of what a rank computes "
            "alone (hidden states, gates, a loss of its own experts). A rank's own parameter wants "
            "core.parallel_state.layout.set_layout",
            stacklevel=program_level(),
        )


def _key(parameter: Tensor) -> _Key:
    """What stands for its values."""
    return tuple(parameter.shape), int(checksum(parameter))
