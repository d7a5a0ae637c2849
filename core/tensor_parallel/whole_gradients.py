"""Notices what a row linear returns, whole on each tensor rank, where it is used with a rank's own columns.

`dn(up(x) * gate(y))`, `gate` a row linear: each rank's gradient of the gate is that of its columns, a part of the
sum, unless `copy_to_tensor_region` stands between. The weights behind are split: no replicated weight shows it.
So in a module's first backwards these gradients are noted, and compared before the next forward.
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import Group, all_gather_objects
from core.parallel_state.collectives.checks import fingerprint

# forwards before which the backwards until then are compared
_COMPARED = (2, 3)
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}


class WholeGradients:
    """Of the row linears over `group` in one module."""

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self._forwards = 0
        self._hooks: list[Any] = []
        # by the linear's name, its first gradient since the last comparison: norm, product
        self._noted: dict[str, tuple[float, float]] = {}
        # relative, of the coarsest of them
        self._rounding = 0.0

    def __deepcopy__(self, memo: dict) -> "WholeGradients":
        return WholeGradients(self._group)  # a copied module is followed anew

    def __reduce__(self) -> tuple:
        return WholeGradients, (None,)

    def before_forward(self, module: nn.Module) -> None:
        """On all ranks: compares in the second and third of them, one small all-gather each. Warns once."""
        if not torch.is_grad_enabled():
            return
        self._forwards += 1
        if self._forwards == 1:
            for name, part in module.named_modules():
                if getattr(part, "input_is_split", False) and not part.splits_sequence:
                    self._hooks.append(part.register_forward_hook(partial(self._follow, name)))
        elif self._forwards in _COMPARED:
            self._compare()
        if self._forwards == _COMPARED[-1]:
            self._end()

    def _follow(self, name: str, part: nn.Module, args: tuple, output: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._note, name))

    @torch.no_grad()
    def _note(self, name: str, gradient: Tensor) -> None:
        if self._hooks and name not in self._noted and not gradient.is_meta:
            norm, product = fingerprint(gradient).tolist()
            self._noted[name] = norm, product
            self._rounding = max(self._rounding, _ROUNDING.get(gradient.dtype, 1e-2))

    def _compare(self) -> None:
        assert self._group is not None
        of_ranks = all_gather_objects((self._noted, self._rounding), self._group)
        self._noted = {}
        rounding = max(rank_rounding for _, rank_rounding in of_ranks)
        for name in sorted(set().union(*(noted for noted, _ in of_ranks))):
            # a rank that does not use it has no gradient
            norms, products = zip(
                *(noted.get(name, (0.0, 0.0)) for noted, _ in of_ranks), strict=True
            )
            difference = max(norms) - min(norms) + max(products) - min(products)
            if difference > rounding * max(norms):
                self._end()
                warnings.warn(
                    f"{name} returns the same on all {self._group.size} tensor ranks, and gets another gradient on "
                    "each: it meets a rank's own columns or heads, whose gradients of it are parts of a sum. "
                    "core.tensor_parallel.copy_to_tensor_region(y, group) before it does sums them (and masks, gates "
                    "and scales of columns are a rank's own: by scatter_to_tensor_region)",
                    stacklevel=program_level(),
                )
                return

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
