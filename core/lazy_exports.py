"""Packages whose names are loaded at first use: schedules, plans and configurations import without torch."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, made from the imports that it writes under `if TYPE_CHECKING:`.

    Type checkers and editors read the same lines, so an exported name is written once. They are its `__all__`, too.
    """
    home = exported(package)

    def load(name: str) -> Any:
        if name == "__all__":  # what `from package import *` asks for
            return sorted(home)
        if name not in home:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(home))}"
            )
        # Not remembered as an attribute of the package: tests replace names in the modules that own them.
        module = import_module(home[name])
        try:
            return getattr(module, name)
        except AttributeError:  # the name is a module itself
            return import_module(f"{home[name]}.{name}")

    def names() -> list[str]:
        return sorted([*vars(sys.modules[package]), *home])

    return load, names


def exported(package: str) -> dict[str, str]:
    """Name -> the module that has it, of each import that stands under `if TYPE_CHECKING:` in a package."""
    loader = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    source = loader.get_source(package)  # type: ignore[union-attr]
    home: dict[str, str] = {}
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for statement in block.body:
                assert isinstance(statement, ast.ImportFrom) and statement.module
                home |= {alias.name: statement.module for alias in statement.names}
    return home
