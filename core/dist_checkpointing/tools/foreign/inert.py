"""Pickles of other programs read as data: classes become records without behaviour, and nothing is called.

Memory grows with the file only. No torch.
"""

import pickle
from typing import Any, ClassVar

MAX_ARGUMENTS = 64


class Record:
    """What a pickle says of an object, and nothing that the object could do. arguments: what it was made with."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        if (
            len(arguments) > MAX_ARGUMENTS
        ):  # a pickle may give the same ones again and again, at no cost in bytes
            raise pickle.UnpicklingError(f"{len(arguments)} arguments, which no class here has")
        self.arguments = arguments


def size_of(dims: Any = ()) -> tuple[Any, ...]:
    """In the place of `torch.Size`."""
    if len(dims) > MAX_ARGUMENTS:
        raise pickle.UnpicklingError(f"a tensor of {len(dims)} dims")
    return tuple(dims)


class InertUnpickler(pickle._Unpickler):
    """What `find_class` of a subclass answers are records, and functions of its own.

    Python's own implementation: the one in C allocates whatever a few bytes ask for.
    """

    stack: list[Any]
    # opcode -> what it does
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[str, type[Record]] = {}

    def record_of(self, name: str) -> type[Record]:
        """One class of records per name."""
        return self._classes.setdefault(name, type(name, (Record,), {}))

    def build(self) -> None:
        """The opcode that would set an object's attributes, or call its `__setstate__`: here it is kept as data."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise pickle.UnpicklingError(f"it changes a {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    dispatch[pickle.BUILD[0]] = build
    for _unused in (
        pickle.BYTEARRAY8,
        pickle.INST,
        pickle.OBJ,
        pickle.EXT1,
        pickle.EXT2,
        pickle.EXT4,
    ):
        del dispatch[_unused[0]]
