"""Names that packages load at first use are the same object at every use."""

import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

from core.lazy_exports import exported

ROOT = Path(__file__).parents[1]
LAZY = [
    ".".join(path.parent.relative_to(ROOT).parts)
    for path in sorted((ROOT / "core").rglob("__init__.py"))
    if "lazy_exports(__name__)" in path.read_text()
]


@pytest.mark.parametrize("package", LAZY)
def test_a_lazy_name_is_never_hidden_by_a_module_of_that_name(package):
    """Importing `package.name` sets the attribute `name` of the package to the module, for good."""
    room = importlib.import_module(package)
    names = exported(package)
    assert names and not {p.stem for p in Path(room.__file__).parent.iterdir()} & names.keys()
    for name, module in names.items():
        first, again = getattr(room, name), getattr(room, name)
        assert first is again and name in dir(room)
        assert isinstance(first, types.ModuleType) == (Path(module.replace(".", "/")) / f"{name}.py").exists()
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = room.nothing_of_that_name


@pytest.mark.parametrize("package", LAZY)
def test_all_of_a_lazy_package_is_what_it_exports(package):
    names = {}
    exec(f"from {package} import *", names)
    assert names.keys() - {"__builtins__"} == exported(package).keys()


def test_the_lazy_packages_are_found():
    assert {"core.parallel_state", "core.pipeline", "core.datasets"} <= set(LAZY)


@pytest.mark.full
def test_type_checkers_see_what_is_exported_and_nothing_else(tmp_path):
    """`Pipeline` of `core.pipeline` is the class, not Any; a name that is misspelt is an error."""
    names = [(package, name) for package in LAZY for name in exported(package)]
    script = tmp_path / "script.py"
    lines = [f"from {package} import {name} as a{i}\nreveal_type(a{i})" for i, (package, name) in enumerate(names)]
    script.write_text("\n".join([*lines, "from core.pipeline import Pipelines", ""]))
    command = [sys.executable, "-m", "mypy", str(script)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert said.count("Revealed type is") == len(names) and 'Revealed type is "Any"' not in said
    assert said.count("error:") == 1 and "Pipelines" in said
