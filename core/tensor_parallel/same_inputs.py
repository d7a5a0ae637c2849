"""Compares over tensor ranks what a program's column linears are given, wherever they are called.

Each takes the same x on every rank. `SplitWatch` looks at a module's forwards; a program may call parts of it by a
method of its own (a decoder with a cache), in which ranks that sample by seeds of their own go on with other tokens.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from core.parallel_state.collectives import Group
from core.parallel_state.collectives.checks import fingerprint
from core.tensor_parallel.differences import unlike_rank

# relative: kernels may differ in last bits
_ROUNDING = 1e-3


class SameInputs:
    """A forward pre-hook of the first column linear of a placement: calls 1, 2, 4, 8 ... are compared, once told.

    One small all-gather then, and nothing in the calls between.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self._calls = 0
        self._told = False

    def __deepcopy__(self, memo: dict) -> "SameInputs":
        return SameInputs(self._group)

    def __reduce__(self) -> tuple:
        return SameInputs, (None,)

    def __call__(self, linear: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return
        # a forward on the meta device has no values
        if linear.weight.is_meta:
            return
        self._calls += 1
        if not self._calls & (self._calls - 1) and not self._told and self._group is not None:
            self._compare(args[0] if args else None, linear.weight.device)  # type: ignore[arg-type]

    @torch.no_grad()
    def _compare(self, x: Any, device: torch.device) -> None:
        assert self._group is not None
        numbers = torch.zeros(2, dtype=torch.float64, device=device)
        if isinstance(x, Tensor) and not x.is_meta and x.numel():
            numbers += fingerprint(x.detach())
        if unlike_rank(numbers, self._group, _ROUNDING) is None:
            return
        self._told = True
        warnings.warn(
            f"ColumnParallelLinear is given another x on each of tensor ranks {list(self._group.ranks)}, call "
            f"{self._calls}: they share one model, and hold parts of its one x. Sample tokens with one seed on all "
            "of them, or on one and broadcast them; give samplers rank=parallel_state.get_data_parallel_rank()",
            stacklevel=5,
        )
