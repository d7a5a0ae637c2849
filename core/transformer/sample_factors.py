"""Numbers and choices that a part of a user's own makes for whole samples, where ranks hold rows of the same samples.

timm's DropPath drops a sample, a locked dropout columns, fairseq's LayerDrop a layer: for all tokens of a sample.
Ranks that were seeded each for itself (`torch.manual_seed(seed + rank)`) drop it for some of them.
"""

import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_tensor import SplitTensor
from core.parallel_state.collectives import Group, all_gather
from core.parallel_state.collectives.checks import fingerprint
from core.parallel_state.random import generators_of
from core.tensor_parallel.column_factors import ELEMENTWISE

# of one forward: how many are compared, each by two numbers
_MAX_FACTORS = 8
# forwards before which those of the forward before are compared
_COMPARED = (2, 3)
_REMEDY = (
    "Seed the ranks that share sequences alike, torch.manual_seed(seed + parallel_state.get_data_parallel_rank()), "
    "numpy and random too, or draw from a generator of its own that is seeded so"
)


class SampleFactors:
    """Notes plain tensors that meet followed rows and have no entry for each, and how many functions parts call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forwards = 0
        self._noted: list[tuple[Tensor, str]] = []
        self._states: list[bytes] = []
        self._calls_of_part = 0
        # of all parts in a forward; what draws for rows may do so otherwise on each rank
        self._calls = 0
        self._draws = False

    @property
    def is_done(self) -> bool:
        """Whether nothing is compared any more."""
        return self._forwards >= _COMPARED[-1]

    def begin(self) -> None:
        """Before a part."""
        self._calls_of_part = 0
        self._states = self._generator_states()

    def end(self, *, draws_for_rows: bool) -> None:
        """After it."""
        self._draws |= not draws_for_rows and self._states != self._generator_states()
        # their order tells, too
        self._calls = (self._calls * 1009 + self._calls_of_part) % 2**40

    def _generator_states(self) -> list[bytes]:
        of_torch = (generator.get_state() for generator in generators_of(self._device))
        of_program = (random.getstate(), numpy.random.get_state(legacy=False))
        return [*(state.numpy().tobytes() for state in of_torch), *map(pickle.dumps, of_program)]

    @torch.no_grad()
    def note(self, where: str, name: str, rows: list[SplitTensor], args: Any) -> None:
        """A function of followed rows."""
        self._calls_of_part += 1
        if name.rstrip("_") not in ELEMENTWISE:
            return
        for factor in pytree.tree_leaves(args):
            is_plain = type(factor) is Tensor and not factor.requires_grad
            if is_plain and len(self._noted) < _MAX_FACTORS and not _has_rows(factor, rows):
                # 0 stands for nothing
                values = factor.double().nan_to_num(nan=0.0, posinf=1e3, neginf=-1e3) + 1
                self._noted.append(
                    (fingerprint(values), f"{where}: {name} of {list(rows[0].shape)}")
                )

    def compare(self, groups: Sequence[Group]) -> str:
        """Before a forward: what is said where those of the last one differ between ranks; else "".

        One all-gather over each of `groups` in the second and third call, whatever was noted; then nothing.
        """
        self._forwards += 1
        if self._forwards not in _COMPARED:
            return ""
        numbers = torch.zeros(2 + 2 * _MAX_FACTORS, dtype=torch.float64, device=self._device)
        numbers[0], numbers[1] = float(self._draws), float(self._calls)
        for place, (pair, _) in enumerate(self._noted):
            numbers[2 + 2 * place : 4 + 2 * place] = pair
        found = [self._found(all_gather(numbers[None], group).cpu()) for group in groups]
        self._noted, self._calls, self._draws = [], 0, False
        if not any(found):
            return ""
        return (
            f"{next(filter(None, found))}: these ranks hold rows of the same sequences, and a seed of its own on "
            f"each drops or scales a sample for some of its tokens. {_REMEDY}"
        )

    def _found(self, gathered: Tensor) -> str:
        if bool(gathered[:, 0].any()) and bool((gathered[:, 1] != gathered[0, 1]).any()):
            return "a part of your own draws numbers and calls other functions on each rank: it is dropped on some"
        of_each = gathered[:, 2:].unflatten(1, (_MAX_FACTORS, 2))
        differ = (of_each != 0).any(2).all(0) & (of_each != of_each[:1]).any(2).any(0)
        if not bool(differ.any()):
            return ""
        what = self._noted[int(differ.nonzero()[0])][1]
        return f"{what} takes numbers for whole samples that differ between {len(gathered)} ranks"


def _has_rows(factor: Tensor, rows: list[SplitTensor]) -> bool:
    """Whether it has an entry for each row, or may: it is broadcast to more than the rows."""
    for x in rows:
        for split_dim in split_axes.split_dims(x.axes):
            dim = split_dim - x.dim()
            if -dim <= factor.dim() and factor.shape[dim] != 1:
                return True
    return False
