"""Frozen weights of replicas: whether a program has written other values into them on some ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from core.data_parallel.buffers.gradient import ParameterSlot
from core.parallel_state.collectives.checks import MODULUS, checksum
from core.parallel_state.layout import layout_of
from core.parallel_state.modules import Modules, named_parameters


class FrozenWeights:
    """What lies in no bucket, because it is not trained, and is the same on all replicas.

    written: since the last `look_for_writes`; writes to `.data` leave no trace there.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        # of DTensors and sparse ones each rank may hold others
        self._parameters = [
            p for p in parameters if p.layout is torch.strided and not hasattr(p, "placements")
        ]
        self._versions = self._sum_of_versions()
        self.written = False

    @classmethod
    def of(cls, module: Modules, slots: Iterable[ParameterSlot]) -> "FrozenWeights":
        """The parameters of `module` that have no slot."""
        trained = {id(slot.parameter) for slot in slots}
        return cls(p for _, p in named_parameters(module) if id(p) not in trained)

    def _sum_of_versions(self) -> int:
        return sum([parameter._version for parameter in self._parameters])

    def look_for_writes(self) -> bool:
        """Whether one was written since the last call."""
        before = self._versions
        self._versions = self._sum_of_versions()
        self.written = before != self._versions
        return self.written

    def checksums(self) -> list[tuple[int, Tensor]]:
        """Of each, beside 0 for a dense one's and 1 for an expert's."""
        result = []
        for number, parameter in enumerate(self._parameters, start=1):
            is_expert = "ep" in layout_of(parameter).split
            # times its number: two that were exchanged do not cancel
            total = checksum(parameter) * number % MODULUS
            result.append((int(is_expert), (total + 1).double()))
        return result
