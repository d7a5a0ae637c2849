"""Whether a loss gives a rank's rows the gradients that it gives them among whole sequences."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.context_parallel.rows.twins import are_proportional, has_twins
from core.parallel_state.context import ContextRows


@dataclass(slots=True)
class Leaf:
    """Where a program's functions begin: a copy of rows, and whole sequences; kept while anything is made of them.

    dim: of the rows.
    """

    own: "weakref.ref[Tensor]"
    whole: "weakref.ref[Tensor]"
    dim: int


def are_gradients_alike(
    losses: list[Tensor], given: list[Tensor], leaves: Sequence[Leaf], rows: ContextRows
) -> bool:
    """Whether those of this rank are 1 or cp times those of whole sequences, a sum's or a mean's.

    losses: with twins. given: the gradients of these, or none. Nothing that can be differentiated is alike.
    """
    found = [
        (own, whole, x.dim)
        for x in leaves
        if (own := x.own()) is not None and (whole := x.whole()) is not None
    ]
    if not found:
        return True
    owns, wholes, _ = zip(*found, strict=True)
    try:
        of_own = _gradients(losses, given, owns, "own")
        of_whole = _gradients(losses, given, wholes, "whole")
        # what is averaged by hand beside means of torch's is like these alone
        of_unscaled = _gradients(losses, given, wholes, "unscaled")
    except RuntimeError:  # a second backward, say
        return True
    for (own, _, dim), one, *of_all in zip(found, of_own, of_whole, of_unscaled, strict=True):
        nothing = torch.zeros_like(own)
        cut = [nothing if x is None else rows.cut(x, dim) for x in of_all]
        here = nothing if one is None else one
        if not any(are_proportional(here, x, (1, rows.size)) for x in cut):
            return False
    return True


def _gradients(
    losses: list[Tensor], given: list[Tensor], leaves: tuple[Tensor, ...], lane: str
) -> tuple[Tensor | None, ...]:
    of_losses = [getattr(x.twins, lane) for x in losses]  # type: ignore[attr-defined]
    seeds = [
        getattr(x.twins, lane) if has_twins(x) else x.as_subclass(Tensor)  # type: ignore[attr-defined]
        for x in given
    ]
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.grad(
            of_losses, leaves, seeds or None, retain_graph=True, allow_unused=True
        )
