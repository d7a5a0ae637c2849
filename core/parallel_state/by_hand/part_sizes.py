"""Sizes of what is split over ranks, as numbers that are known again where columns are scaled by them.

`y / y.shape[-1] ** 0.5` divides by another number where the last dim is a rank's part. Sizes go into views, ranges
and masks as well, where they are right: so nothing is said before they meet a tensor's values.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.numbers import plain_copy
from core.parallel_state.by_hand.split_axes import Axes

# what is rounded down (`//`) has become another number, of heads or of a head's columns
_KEPT = """
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__
"""
_SCALING = """
    mul imul multiply div idiv divide truediv itruediv true_divide rdiv rtruediv pow ipow add iadd sub isub rsub
    scaled_dot_product_attention addcmul addcdiv lerp
"""


class Counts(Protocol):
    """Who hears what a program makes of a count of one rank's rows."""

    def is_of_all(self, factor: Any) -> bool:
        """Whether a count times `factor` is that of all rows."""

    def of_product(self) -> "Counts":
        """Of a count times another."""

    def made(self, name: str, others: tuple, result: Any) -> None:
        """A method of the number, called by whom called its caller, has made `result` of it and `others`."""

    def taken(self) -> None:
        """It was asked for a float, likewise."""


class PartNumber:
    """Beside int or float: it was made of the size of a part, of which so many ranks have one.

    ranks: 0 where only that is known. as_floats: sizes of which a program made rates, or which C functions
    (`math.sqrt`) took, whose results are plain numbers. whole: the number made of all ranks' size, where it is known.
    counts: of a batch's rows.
    """

    ranks: int
    as_floats: set[int]
    whole: Any
    counts: Counts | None


def _following(base: type, name: str) -> Callable[..., Any]:
    plain = getattr(base, name)

    def method(self: Any, *others: Any) -> Any:
        result = plain(self, *others)
        # an int leaves the arithmetic with a float to that
        if result is NotImplemented and base is int and isinstance(others[0], float):
            result = getattr(float, name)(int.__float__(self), *others)
        # of a tensor, or what else, which computes it itself; `pow(n, 2, 5)`
        if type(result) not in (int, float) or len(others) > 1:
            return result
        # times the number of ranks it is the size of all; a count of tokens goes on in a checkpoint
        counts = _counts_of(name, self, others)
        is_of_all = "mul" in name and (
            others == (self.ranks,) or (counts is not None and counts.is_of_all(others[0]))
        )
        if is_of_all:
            return result
        if counts is not None:
            counts.made(name, others, result)
        if name == "__radd__" and self.whole is not None:
            return result
        if base is int and type(result) is float:
            self.as_floats.add(int(self))
        whole = None if self.whole is None else _of_all(name, self, *others)
        return number_of_part(result, self.ranks, self.as_floats, whole, counts)

    return method


def _of_all(name: str, *numbers: Any) -> Any:
    """What a method of these makes of the numbers of all ranks; None: none that is one."""
    is_reflected = name.startswith("__r")
    function = getattr(operator, name.strip("_")[is_reflected:])
    try:
        result = function(*map(whole_number, numbers[::-1] if is_reflected else numbers))
    except ArithmeticError:
        return None
    return result if type(result) in (int, float) else None


def _as_float(self: Any) -> float:
    self.as_floats.add(int(self))
    if self.counts is not None:
        self.counts.taken()
    return int.__float__(self)


def _counts_of(name: str, number: Any, others: tuple) -> Counts | None:
    """Of what a method makes of these."""
    known = [x.counts for x in (number, *others) if isinstance(x, PartNumber) and x.counts]
    # in the quotient of two counts the ranks' numbers are gone
    if not known or (len(known) > 1 and "div" in name):
        return None
    is_product = "mul" in name and isinstance(others[0], PartNumber)
    return known[0].of_product() if is_product else known[0]


def _class(base: type, **more: Any) -> type:
    methods = {name: _following(base, name) for name in _KEPT.split()}
    names = {"__reduce_ex__": plain_copy, "__module__": "builtins"}
    return type(base.__name__, (base, PartNumber), methods | names | more)


_CLASS_OF = {int: _class(int, __float__=_as_float), float: _class(float)}


def number_of_part(
    number: int | float,
    ranks: int,
    as_floats: set[int],
    whole: float | None = None,
    counts: Counts | None = None,
) -> Any:
    """`number`, made of a part that one of `ranks` ranks has, known again; the others: as of `PartNumber`."""
    result = _CLASS_OF[type(number)](number)
    result.ranks = ranks
    result.as_floats = as_floats
    result.whole = whole
    result.counts = counts
    return result


def counted(size: int, counts: Counts) -> Any:
    """A size of a batch's rows, or beside one: known again where a program counts by it."""
    known = size if isinstance(size, PartNumber) else number_of_part(size, 0, set(), whole=size)
    known.counts = counts if known.whole != known else None
    return known


def whole_number(x: Any) -> Any:
    """What it is of all ranks, where that is known; else itself."""
    whole = x.whole if isinstance(x, PartNumber) else None
    return x if whole is None else whole


class ToldSize(int):
    """A size of a part that tells where a rate is made of it: divided, a root of it, a float."""

    tell: Callable[[], None]
    __reduce_ex__ = plain_copy


def _telling(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: ToldSize, *others: Any) -> Any:
        self.tell()
        return plain(self, *others)

    return method


def _kept(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: ToldSize, *others: Any) -> Any:
        result = plain(self, *others)
        return told_size(result, self.tell) if type(result) is int else result

    return method


for _name in ("__truediv__", "__rtruediv__", "__pow__", "__float__"):
    setattr(ToldSize, _name, _telling(_name))
for _name in ("__mul__", "__rmul__"):
    setattr(ToldSize, _name, _kept(_name))


def told_size(size: int, tell: Callable[[], None]) -> int:
    """`size`, which calls `tell()` where a rate is made of it."""
    result = ToldSize(size)
    result.tell = tell
    return result


def sizes_of_parts(sizes: Any, axes: Axes, dim: Any, ranks: int, as_floats: set[int]) -> Any:
    """`x.shape`, `x.size(dim)` or `x.numel()` of what is split as `axes` says: the same numbers, known again."""
    return with_sizes(sizes, axes, dim, lambda size: number_of_part(size, ranks, as_floats))


def with_sizes(sizes: Any, axes: Axes, dim: Any, of_part: Callable[[int], int]) -> Any:
    """The same, with `of_part` of each size of a split dim."""
    if isinstance(sizes, int):
        if split_axes.is_split(axes, [dim] if isinstance(dim, int) else None):
            return of_part(sizes)
        return sizes
    if len(sizes) != len(axes):
        return sizes
    return torch.Size(
        [
            of_part(size) if split_axes.is_split(axes, [place]) else size
            for place, size in enumerate(sizes)
        ]
    )


def scales_by_a_part(name: str, values: Sequence[Any], as_floats: set[int]) -> bool:
    """Whether a function of followed columns, called with `values`, takes a number made of a part's size."""
    if name not in _SCALING.split():
        return False
    # of math.sqrt(n), or of float(n)
    suspects = {float(power) for n in as_floats for power in (n, 1 / n, n**0.5, n**-0.5)}
    numbers = [x for x in pytree.tree_leaves(values) if isinstance(x, (int, float))]
    return any((isinstance(x, PartNumber) and x.ranks) or float(x) in suspects for x in numbers)
