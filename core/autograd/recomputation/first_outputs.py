"""Whether a second run gives what the first one gave: what followed saw the first, gradients are of the second."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# kernels that add in any order give other last bits
_ROUNDING = 1e-4


def _is_comparable(output: Any) -> bool:
    # quantised and sparse ones have no such norm, and those that are only computed if they are read no value
    if (
        type(output) not in (Tensor, nn.Parameter)
        or output.layout is not torch.strided
        or output.is_nested
    ):
        return False
    return (output.is_floating_point() or output.is_complex()) and output.dtype.itemsize > 1


def _magnitude(output: Any) -> Tensor | None:
    if not _is_comparable(output):
        return None
    wide = torch.promote_types(output.dtype, torch.float32)
    # a reduction: no second tensor as large as the output
    return torch.linalg.vector_norm(output.detach(), 1, dtype=wide)


def magnitudes(outputs: Any) -> list[Tensor | None]:
    """Of each leaf in a nest of outputs the sum of its absolute values, on its device; None where it has none."""
    return [_magnitude(leaf) for leaf in pytree.tree_leaves(outputs)]


class SameOutputs:
    """Compares the first runs of one stage or region with the runs inside backward, the first few times."""

    def __init__(self) -> None:
        # a forward that differs mostly does so each time
        self._remaining = 2
        self._told = False

    def is_turn(self) -> bool:
        """Before a first run: whether it is to be compared. Not once enough was."""
        if not self._remaining or torch.compiler.is_compiling():
            return False
        self._remaining -= 1
        return True

    def compare(self, first: list[Tensor | None], second: list[Tensor | None], owner: str) -> None:
        """Warn, once, where the `magnitudes` of a second run are others, but for rounding."""
        for one, other in zip(first, second, strict=False):
            if one is None or other is None:
                continue
            before, now = float(one), float(other)
            if not self._told and abs(now - before) > _ROUNDING * max(now, before):
                self._told = True
                warnings.warn(
                    f"{owner} gave other outputs when it ran again for its backward (magnitudes sum to {before:g}, "
                    f"then to {now:g}); its gradients are of the second run. Recomputed, a forward runs twice, first "
                    "without gradients: it must not ask torch.is_grad_enabled() or requires_grad, nor change "
                    "what is neither its buffer nor its attribute. Use recompute='none' for such a module",
                    stacklevel=3,
                )
