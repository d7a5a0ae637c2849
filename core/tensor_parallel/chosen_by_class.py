"""Programs that choose modules by torch's class, `isinstance(m, nn.Linear)`, of which a parallel layer is none."""

import dis
import sys
import warnings
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn


def names_class_of_torch(code: CodeType, torch_class: str, here: str) -> bool:
    """Whether `code` names torch's class alone, without the one that stands here in its place."""
    return torch_class in code.co_names and here not in code.co_names


def tell_of_loop(model: nn.Module, classes: dict[str, set[str]]) -> bool:
    """Warn where a program's loop over `model.modules()` is under way that no module will be chosen in.

    classes: torch's class -> the names of those that stand here in its place. Returns whether it was told.
    """
    frame: Any = sys._getframe(2)
    level = 3
    while frame is not None and frame.f_code.co_name in ("modules", "named_modules"):
        frame = frame.f_back
        level += 1
    if frame is None or frame.f_globals.get("__name__", "").startswith(("torch.", "core.")):
        return False
    codes = [frame.f_code, *_comprehensions(frame.f_code)]
    for torch_class, here in classes.items():
        if any(_asks_whether_one(code, torch_class, *here) for code in codes):
            given = ", ".join([f"nn.{torch_class}", *sorted(here)])
            warnings.warn(
                f"a loop over the modules of {type(model).__name__} asks for nn.{torch_class}, which a "
                f"{' or a '.join(sorted(here))} is not: none of them is chosen. Ask isinstance(m, ({given}))",
                stacklevel=level,
            )
            return True
    return False


def _comprehensions(code: CodeType) -> list[CodeType]:
    """Before Python 3.12 each is a function of its own; what it goes through is called outside."""
    inside = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [
        each
        for each in inside
        if each.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
    ]


@lru_cache(256)
def _asks_whether_one(code: CodeType, torch_class: str, *here: str) -> bool:
    """Whether `isinstance` is asked with this class, or with a name that a line gives to it."""
    if not all(names_class_of_torch(code, torch_class, name) for name in here):
        return False
    asked: set[str] = set()
    choices = {torch_class}
    # between `isinstance` and its call; between the class and the end of its line, if nothing is called there
    in_question = False
    line_of_class: int | None = None
    for each in dis.get_instructions(code):
        line = each.positions.lineno if each.positions else None
        # two that Python loads at once are a tuple
        names = {*(each.argval if isinstance(each.argval, tuple) else (each.argval,))}
        is_call = each.opname.startswith("CALL")
        in_question = (in_question and not is_call) or "isinstance" in names
        if in_question:
            asked |= names
        elif torch_class in names:
            line_of_class = line
        elif is_call or line != line_of_class:
            line_of_class = None
        elif each.opname.startswith("STORE_"):
            choices |= names
    return bool(asked & choices)
