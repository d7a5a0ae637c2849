"""Activations that hooks keep where `loss_fn` looks for them, on a rank where it is never called."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

# at each depth: more are no names of layers
_MOST = 10_000
_DEPTH = 3
_NO_OBJECTS = (type, nn.Module, FunctionType, ModuleType)


def name_of_kept(loss_fn: Callable[..., Any]) -> str | None:
    """The name in `loss_fn` of what holds a tensor that has a graph; None where nothing does."""
    for name, value in names_in(loss_fn):
        if any(isinstance(x, Tensor) and x.grad_fn is not None for x in held_in(value)):
            return name
    return None


def names_in(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function refers to, with the names for it: closures, globals, defaults, what it is bound to."""
    if isinstance(function, partial):
        yield from ((f"argument {i}", x) for i, x in enumerate(function.args))
        yield from function.keywords.items()
        function = function.func
    if isinstance(function, MethodType):
        yield from vars(function.__self__).items() if hasattr(function.__self__, "__dict__") else ()
        function = function.__func__
    if not isinstance(function, FunctionType):
        yield from getattr(function, "__dict__", {}).items()
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    for name in _globals_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    code, defaults = function.__code__, function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    yield from zip(code.co_varnames[first : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def reached_from(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function refers to, and functions of its file that it refers to."""
    level, seen = [function], {id(function)}
    for _ in range(_DEPTH):
        named = [each for f in level for each in names_in(f)]
        yield from named
        inner = [getattr(value, "__func__", value) for _, value in named]
        own = getattr(function, "__module__", None)
        level = [
            f
            for f in inner
            if isinstance(f, FunctionType) and f.__module__ == own and id(f) not in seen
        ]
        seen.update(map(id, level))


def _globals_in(code: CodeType) -> set[str]:
    inside = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*map(_globals_in, inside))


def held_in(value: Any) -> Iterator[Any]:
    """A value; what a container, or an object of the program's, holds; what that holds."""
    level = [value]
    for _ in range(_DEPTH):
        yield from level
        level = [item for each in level for item in _items_of(each)][:_MOST]
    yield from level


def _items_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    is_object = hasattr(value, "__dict__") and not isinstance(value, _NO_OBJECTS)
    return list(vars(value).values()) if is_object else []
