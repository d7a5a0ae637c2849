"""Names that packages load at first use are the same object at every use."""

import ast
import importlib
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAZY = [
    ".".join(path.parent.relative_to(ROOT).parts)
    for path in sorted((ROOT / "core").rglob("__init__.py"))
    if "def __getattr__" in path.read_text()
]


@pytest.mark.parametrize("package", LAZY)
def test_a_lazy_name_is_never_hidden_by_a_module_of_that_name(package):
    """Importing `package.name` sets the attribute `name` of the package to the module, for good."""
    room = importlib.import_module(package)
    names = set(getattr(room, "_HOME", {}))
    assert names and not {p.stem for p in Path(room.__file__).parent.iterdir()} & names
    for name in names:
        first, again = getattr(room, name), getattr(room, name)
        assert first is again and not isinstance(first, types.ModuleType)
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = room.nothing_of_that_name


def test_the_lazy_packages_are_found():
    assert {"core.parallel_state", "core.pipeline", "core.datasets"} <= set(LAZY)


@pytest.mark.parametrize("package", LAZY)
def test_names_that_type_checkers_see_are_those_that_are_loaded(package):
    """Where a package says its names twice, for types and for loading, both lists are the same."""
    room = importlib.import_module(package)
    seen = {
        alias.asname: node.module.removeprefix(f"{package}.")
        for block in ast.parse(Path(room.__file__).read_text()).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        for alias in node.names
    }
    assert seen in ({}, room._HOME)
