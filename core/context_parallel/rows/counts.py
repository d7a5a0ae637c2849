"""Counts of a batch's rows, of which each context rank has its own: tokens seen, rates by a batch's size."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from core.context_parallel.rows.uses import computes, rounds, takes_root
from core.parallel_state.by_hand import called_by_core


@dataclass(frozen=True)
class RowCounts:
    """`tell()` is called where a program counts one rank's rows over steps of a training, or makes a rate of a count.

    ranks: that have all rows, by which a count is multiplied to be of all. is_total: of several sequences.
    """

    tell: Callable[[], None]
    ranks: int
    is_total: bool = False

    def is_of_all(self, factor: Any) -> bool:
        """Whether `factor` is the number of ranks, or a multiple; a size of rows is an int of another class."""
        return type(factor) is int and factor > 1 and factor % self.ranks == 0

    def of_product(self) -> "RowCounts":
        """Of rows times sequences."""
        return replace(self, is_total=True)

    def made(self, name: str, others: tuple, result: Any) -> None:
        """Tell of a sum of counts, or of a rate, that the program computes itself."""
        frame = sys._getframe(2)
        if called_by_core(frame) or not computes(frame):
            return
        if "add" in name:
            is_told = self.is_total and torch.is_grad_enabled()
        else:
            # `1 / n` divides a loss, `math.ceil(n / 5)` is a number of chunks
            is_chunks = name == "__truediv__" and rounds(frame)
            is_told = type(result) is float and others != (1,) and not is_chunks
        if is_told:
            self.tell()

    def taken(self) -> None:
        """Tell of a root, say; put into a tensor, to be summed over the ranks, it is read as a float, too."""
        frame = sys._getframe(2)
        if not called_by_core(frame) and takes_root(frame):
            self.tell()
