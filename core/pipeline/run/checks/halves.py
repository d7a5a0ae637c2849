"""Halves of a microbatch's rows that `loss_fn` pairs as if they were the batch's: chosen and rejected, say."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.as_written import AsWritten, compiles
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.by_hand.split_functions import outcome_of
from core.parallel_state.by_hand.split_names import kind_of
from core.parallel_state.by_hand.split_tensor import Call, Follower, SplitTensor

_COUNTED = ("chunk", "tensor_split")
_SIZED = ("split", "split_with_sizes", "narrow")


class HalvesOfRows(Follower):
    """Follows the rows of one microbatch through `loss_fn`, and warns, once, where they are cut in two halves."""

    def __init__(self, microbatches: int) -> None:
        super().__init__()
        self._microbatches = microbatches
        self._has_told = False
        # what is compiled calls no function that could be heard
        self._eager = AsWritten()

    @contextmanager
    def following(self, arguments: Any) -> Iterator[None]:
        """While `loss_fn` runs. arguments: its output and microbatch, [rows, ...] most of them."""
        tensors = [
            x for x in pytree.tree_leaves(arguments[1:]) if isinstance(x, Tensor) and x.dim()
        ]
        rows = tensors[0].shape[0] if tensors else 0
        if self._has_told or self._microbatches < 2 or rows < 2:
            yield
            return
        if compiles():
            self._eager.hold()
        try:
            for x in pytree.tree_leaves(arguments):
                if type(x) is Tensor and x.dim() and x.shape[0] == rows:
                    self.mark(x, (((rows, True),), *split_axes.plain(x.shape[1:])))
            yield
        finally:
            self.make_plain()
            self._eager.end()

    def follow(self, call: Call) -> None:
        if self._has_told:
            return
        try:
            is_half = isinstance(call.args[0], SplitTensor) and _are_halves(call)
            outcome = outcome_of(call.func, call.name, call.args, call.kwargs, call.result)
        except Exception:
            # who looks on must not end a right program
            return
        if is_half:
            self._tell(call.name)
        elif isinstance(outcome, list):
            for tensor, axes in outcome:
                self.mark(tensor, axes)

    def _tell(self, name: str) -> None:
        self._has_told = True
        warnings.warn(
            f"loss_fn takes halves of a microbatch's rows ({name}), and the batch is cut along dim 0 into "
            f"{self._microbatches} microbatches: row i of the batch's first half is no longer beside row i of its "
            "second. Let partners be neighbours in the batch, and take output[0::2] and output[1::2], or order "
            "the batch so that each microbatch has the halves that belong together",
            stacklevel=program_level(),
        )


def _are_halves(call: Call) -> bool:
    """Whether rows, dim 0, are cut in two, or a half of them is taken; neighbours and single rows are none."""
    x, args, kwargs = call.args[0], call.args, call.kwargs
    # of flat rows chunks are made to save memory
    if not x.axes or x.axes[0] != ((x.shape[0], True),):
        return False
    rows, results = x.shape[0], pytree.tree_leaves(call.result)
    is_half = bool(results) and isinstance(results[0], Tensor) and results[0].dim() == x.dim()
    is_half = is_half and 2 * results[0].shape[0] == rows
    if call.name in _COUNTED or call.name in _SIZED:
        first = 1 if call.name == "narrow" else 2
        return is_half and kwargs.get("dim", args[first] if len(args) > first else 0) == 0
    if call.name == "getitem":
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        return is_half and isinstance(index, slice) and index.step in (None, 1)
    if kind_of(call.name) != "view" or rows == 2 or call.result.dim() < 2:
        return False
    # neighbours are `view(-1, 2)`
    sizes = pytree.tree_leaves(args[1:])
    return sizes[:1] == [2] and call.result.shape[:2] == (2, rows // 2)
