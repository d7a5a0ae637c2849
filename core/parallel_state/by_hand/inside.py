"""Operators of aten on gradients that lie in buckets: what a program called, whatever torch made of it."""

import sys
import weakref
from typing import Any, Protocol

from torch import Tensor

from core.parallel_state.by_hand.functions import called_by_program
from core.parallel_state.by_hand.heard import Heard

# whose frames lie between
_BUCKETS = "core.data_parallel.buffers."


class HearsInside(Protocol):
    """Who is told."""

    is_open: bool

    def heard_inside(
        self, source: Heard, func: Any, result: Any, call: tuple[tuple, dict], norm_of: int | None
    ) -> None:
        """An operator, as `called_inside` was given it."""
        ...


def called_inside(
    reference: "weakref.ref[HearsInside]",
    source: Heard,
    func: Any,
    result: Any,
    call: tuple[tuple, dict] = ((), {}),
    *,
    norm_of: int | None = None,
) -> None:
    """A gradient that lies in buckets was given to an operator of aten, or to a method. call: its arguments.

    norm_of: the operator took norms, which are of full gradients, of so many parameters.
    """
    listener = reference()
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BUCKETS):
        frame = frame.f_back  # type: ignore[assignment]
    if listener is None or not listener.is_open or not called_by_program(frame):
        return
    listener.heard_inside(source, func, result, call, norm_of)


def keeps_all(args: tuple, result: Tensor) -> bool:
    """Whether `result` has as many elements as the first argument: `p.grad.flatten()`."""
    return isinstance(args[0], Tensor) and result.numel() == args[0].numel()
