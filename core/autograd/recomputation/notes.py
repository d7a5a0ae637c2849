"""Results of a recomputed forward that its second run takes over instead of computing them again.

A recomputed forward drops its activations. What costs much time and little memory (attention's output), or must not
come out otherwise the second time (the routing of tokens to experts), is noted in the first run and read in the
second.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

# Set while a forward runs that has a second run, and in that second run, each time in the thread that runs it.
_current: ContextVar["Notes | None"] = ContextVar("notes", default=None)

# Set by whoever keeps the activations of a forward elsewhere: takes one, returns what gives it back.
GiveBack = Callable[[], Tensor]
move_noted: ContextVar[Callable[[Tensor], GiveBack] | None] = ContextVar("moved", default=None)

_REMEDY = (
    "what a region calls must not depend on anything that changes between them, nor run compiled in one of them only "
    "(torch gives up after too many recompilations): compile all layers or none, or set recompute_keeps='nothing'"
)


class _Moved:
    """Stands for a noted tensor that waits elsewhere."""

    def __init__(self, give_back: GiveBack) -> None:
        self.give_back = give_back


class Notes:
    """What one forward of one microbatch noted, in the order of its calls.

    keeps_activations: whether what `note` was told to be an activation is noted, too.
    """

    def __init__(self, *, keeps_activations: bool = False) -> None:
        self.keeps_activations = keeps_activations
        # values; how often each tensor had been written
        self._noted: list[tuple[tuple[Any, ...], list[int]]] = []
        # to be read by the second run
        self._next: int | None = None
        self._noted_activations = False
        self._outer: Notes | None = None

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Around the forward whose results are noted; a region inside a second run reads from the outer one."""
        self._noted = []
        self._next = None
        self._outer = _current.get()
        self._noted_activations = False
        # what the outer one noted is read here, not made
        if self._outer is not None:
            self.keeps_activations = self.keeps_activations or self._outer.keeps_activations
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Around the forward that reads them; it may be run several times, each from the first note on.

        Raises RuntimeError: it reads fewer than there are.
        """
        self._next = 0
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
        if self._next != len(self._noted):
            raise RuntimeError(
                f"recompute: the second run called {self._next} operations that are noted, the first one "
                f"{len(self._noted)}; {_REMEDY}"
            )

    @property
    def is_second(self) -> bool:
        """Whether the run under way is the second one, or part of one."""
        return self._next is not None or (self._outer is not None and self._outer.is_second)

    def take(self, make: Callable[[], tuple[Any, ...]], *, activation: bool) -> tuple[Any, ...]:
        """In the first run call `make` and remember what it returns; in the second return that. See `note`."""
        if activation and not self.keeps_activations:
            return make()
        if self._next is None:
            if self._outer is None:
                results = make()
            else:
                results = self._outer.take(make, activation=activation)
            # aliases without a graph: a noted tensor must not keep alive what it was computed from
            aliases = tuple(
                value.detach() if isinstance(value, Tensor) else value for value in results
            )
            self._noted_activations = self._noted_activations or activation
            if activation and (move := move_noted.get()) is not None:
                aliases = tuple(
                    _Moved(move(value)) if isinstance(value, Tensor) else value for value in aliases
                )
            self._noted.append(
                (aliases, [value._version for value in aliases if isinstance(value, Tensor)])
            )
            return results
        # the first run was compiled, which notes none
        if activation and not self._noted_activations:
            return make()
        if self._next >= len(self._noted):
            raise RuntimeError(
                "recompute: the second run called more operations that are noted than the first one, which called "
                f"{len(self._noted)}; {_REMEDY}"
            )
        values, versions = self._noted[self._next]
        self._next += 1
        if versions != [value._version for value in values if isinstance(value, Tensor)]:
            raise RuntimeError(
                "recompute: a result that was noted for the second run was written in place; clone it"
            )
        values = tuple(
            value.give_back() if isinstance(value, _Moved) else value for value in values
        )
        return tuple(value.detach() if isinstance(value, Tensor) else value for value in values)


def note(make: Callable[[], tuple[Any, ...]], *, activation: bool = False) -> tuple[Any, ...]:
    """`make()`, or in the second run of a recomputed forward what it returned in the first one.

    make: returns a tuple of tensors and constants, computed without a graph: call it where none is recorded, in the
    forward of a `torch.autograd.Function` above all. activation: it is large, and worth its memory only where
    `recompute_keeps` says so.
    """
    notes = _current.get()
    if notes is None:
        return make()
    return notes.take(make, activation=activation)


def which_run() -> int:
    """1 or 2: the first or second run of a recomputed forward is under way; 0: an ordinary one, or none."""
    notes = _current.get()
    if notes is None:
        return 0
    return 1 + notes.is_second


def notes_activations() -> bool:
    """Whether an activation that is noted now would be kept, or is read."""
    notes = _current.get()
    return notes is not None and notes.keeps_activations
