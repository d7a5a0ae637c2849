"""The base of tensors whose class hears what a program calls on them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# what those who listen write on a tensor
_MARKS = ("axes", "partial", "seen_by", "numbers", "counted", "total", "heard", "twins")


def gather_first(types: Iterable[type], func: Any, args: tuple, kwargs: dict | None) -> None:
    """torch asks one class alone: let another, of weights that are elsewhere (ZeRO-3's), bring them for `func`."""
    with torch._C.DisableTorchFunctionSubclass():
        for kind in types:
            if (gather := getattr(kind, "gather_first", None)) is not None:
                gather(func, args, kwargs)


def unmark(tensor: Any, plain: type = Tensor) -> None:
    """Nobody listens to it any more: of its own class again, and without marks, which no file could hold."""
    tensor.__class__ = plain
    for mark in _MARKS:
        tensor.__dict__.pop(mark, None)


class ListenedTensor(Tensor):
    """Copies, files and texts of it are those of a plain tensor."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:  # torch's refuses a spec of numbers to subclasses
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__format__(spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return repr(self.as_subclass(Tensor))

    def __deepcopy__(self, memo: dict) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(Tensor)
            # the copy is noted by the id of `plain`, which no other tensor may get meanwhile
            memo.setdefault(id(memo), []).append(plain)
            memo[id(self)] = copy = plain.__deepcopy__(memo)
        return copy
