"""Statistics of several modules that a program puts together on one pipeline rank, which has some of the layers."""

import dis
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from core.parallel_state.by_hand.functions import is_foreign, program_level
from core.pipeline.run.checks.kept_by_hooks import held_in, reached_from
from core.pipeline.run.checks.program_parts import (
    HOOKS,
    Attributes,
    code_of,
    foreign_hooks,
    parts_of,
    public,
)

# calls of a pipeline that are looked at: a log every hundred steps is among them
_WATCHED_CALLS = 128
_OF_ALL_MODULES = tuple(f"_global{name}" for name in HOOKS)

# what tells whether a value was written: numbers themselves, of a tensor the one and its version, lengths
Mark = tuple[Any, ...]
# whose hooks (their code) or attribute, and its name
Collector = tuple[Any, str]


class CollectedStatistics:
    """Warns, once, of numbers that a call left where hooks, or modules, keep them of several modules of this rank."""

    def __init__(self, stages: Mapping[int, nn.Module], pipeline_ranks: int) -> None:
        self._stages = stages
        self._ranks = pipeline_ranks
        self._calls = 0
        self._has_told = False
        self._before: dict[Collector, dict[str, Mark]] | None = None
        self._parts = parts_of(self._stages)
        self._attributes = Attributes(self._parts)

    def before_call(self) -> None:
        """A call begins, of any kind."""
        self._calls += 1
        is_watched = not self._has_told and self._calls <= _WATCHED_CALLS
        # modules come and go between calls
        if is_watched and not self._calls & (self._calls - 1):
            self._parts = parts_of(self._stages)
        self._before = self._collected() if is_watched else None

    def after_call(self, *, besides: str) -> bool:
        """Tell of what is another than before the call, but of `besides`. Whether it was told, now or earlier."""
        before, self._before = self._before, None
        if before is None:
            return self._has_told
        for collector, marks in self._collected().items():
            old = before.get(collector, {})
            written = [name for name, mark in marks.items() if mark and old.get(name) != mark]
            is_told = collector[1] == besides
            if (
                not is_told
                and self._are_layers(written)
                and not self._are_taken_up(collector[1], written)
            ):
                self._tell(collector[1], written)
                break
        return self._has_told

    def _are_layers(self, written: list[str]) -> bool:
        """Whether several modules, or the only layer that this rank has."""
        if len(written) != 1:
            return len(written) > 1
        pieces = written[0].split(".")
        lists = [".".join(pieces[:i]) for i, piece in enumerate(pieces) if piece.isdigit()]
        return any(len(self._parts[name]._modules) == 1 for name in lists if name in self._parts)

    def _are_taken_up(self, kept: str, written: list[str]) -> bool:
        """Whether modules around read it in their forwards, and keep no numbers: it goes on with the activations."""
        return all(
            any(self._takes_up(kept, name, around) for around in _around(name)) for name in written
        )

    def _takes_up(self, kept: str, name: str, around: str) -> bool:
        module = self._parts.get(around)
        if (
            module is None
            or type(module) is type(self._parts[name])
            or not is_foreign(type(module))
        ):
            return False
        keeps_numbers = any(_is_statistic(x) for _, x in self._attributes.later(module))
        return not keeps_numbers and any(_reads(f, kept) for f in _run_by(module))

    def _tell(self, name: str, written: list[str]) -> None:
        self._has_told = True
        where = written[0] if len(written) == 1 else f"{written[0]} to {written[-1]}"
        warnings.warn(
            f"`{name}` keeps numbers of {len(written)} modules of this rank ({where}), one of {self._ranks} pipeline "
            "ranks; others have other layers: a mean, sum or maximum of them is not the model's. Each by its name is "
            "right; sum, and count, over parallel_state.get_pipeline_model_parallel_group(), or gather by name",
            stacklevel=program_level(),
        )

    def _collected(self) -> dict[Collector, dict[str, Mark]]:
        """By collector and module: the mark of what is kept of it."""
        found: dict[Collector, dict[str, Mark]] = {}
        # what hooks share is looked at once
        marks: dict[int, Mark] = {}
        of_all = [x for name in _OF_ALL_MODULES for x in _foreign(vars(torch_module)[name])]
        for name, part in self._parts.items():
            for hook in (*foreign_hooks(part), *of_all):
                for kept, value in _named_by(hook):
                    if id(value) not in marks:
                        marks[id(value)] = mark_of(value)
                    found.setdefault((code_of(hook), kept), {})[name] = marks[id(value)]
            for kept, value in self._attributes.of(part):
                # a class of the program's may keep activations of its own
                is_put = isinstance(value, Tensor) and not is_foreign(type(part))
                if is_put or _is_statistic(value):
                    found.setdefault((type(part), kept), {})[name] = mark_of(value)
        return found


def _around(name: str) -> list[str]:
    pieces = name.split(".")
    return [".".join(pieces[:i]) for i in range(len(pieces))]


def _run_by(module: nn.Module) -> list[FunctionType]:
    """Its forward, and functions that it was given."""
    given = (getattr(type(module), "forward", None), *vars(module).values())
    return [f for f in given if isinstance(f, FunctionType)]


def _reads(function: FunctionType, attribute: str) -> bool:
    return any(
        each.argval == attribute and each.opname in ("LOAD_ATTR", "LOAD_METHOD")
        for each in dis.get_instructions(function)
    )


def _foreign(hooks: Mapping[int, Any]) -> list[Any]:
    return [hook for hook in hooks.values() if is_foreign(hook)] if hooks else []


def _named_by(hook: Any) -> Iterable[tuple[str, Any]]:
    """What a hook refers to; of a module what that keeps."""
    for name, value in reached_from(hook):
        is_own = isinstance(value, nn.Module) and is_foreign(type(value))
        yield from public(value) if is_own else [(name, value)]


def _is_statistic(value: Any) -> bool:
    """A number, or one for each feature, or several of these; activations that a module keeps are none."""
    if isinstance(value, (list, dict)):
        return any(_is_statistic(each) for each in held_in(value) if each is not value)
    return isinstance(value, float) or (type(value) is Tensor and value.dim() < 2)


def mark_of(value: Any) -> Mark:
    """() where it holds no numbers."""
    if not is_foreign(type(value)):
        return ()
    marks: list[Any] = []
    has_numbers = False
    for each in held_in(value):
        if isinstance(each, Tensor):
            marks += [_Same(each), None if each.is_inference() else each._version]
        elif isinstance(each, float):
            marks.append(each)
        elif isinstance(each, (list, set, dict, deque)):
            marks.append(len(each))
        # an integer by itself counts calls; integers in a container are kept
        has_numbers |= isinstance(each, (Tensor, float)) or (
            type(each) is int and each is not value
        )
    return tuple(marks) if has_numbers else ()


class _Same:
    """Equals of one tensor, while it lives: an address is used again."""

    def __init__(self, tensor: Tensor) -> None:
        self._reference = weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._reference is other._reference

    __hash__ = object.__hash__
