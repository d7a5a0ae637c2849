"""Functions that a run names as text, "package.module:function": a model or a schedule of one's own."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def is_function_name(text: str) -> bool:
    """Whether it has the form package.module:function."""
    module, colon, function = text.partition(":")
    return (
        bool(colon)
        and function.isidentifier()
        and all(part.isidentifier() for part in module.split("."))
    )


def function_of(name: str) -> Callable[..., Any]:
    """The function of that name, from a module on Python's path or in the working directory.

    Raises ValueError: no such name, module or function; a module that cannot be imported, with its error.
    """
    if not is_function_name(name):
        raise ValueError(f"{name!r} is no function; write package.module:function")
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        # torchrun puts the script's directory there alone
        sys.path.append(os.getcwd())
    try:
        # a user's module may raise anything while it is imported
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"{name}: module {module_name} cannot be imported from {os.getcwd()} or Python's path "
            f"({type(error).__name__}: {error})"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", None) == module_name
        ]
        raise ValueError(
            f"{name}: {module_name} has no function {function_name}; it has {', '.join(known) or 'none'}"
        )
    return function
