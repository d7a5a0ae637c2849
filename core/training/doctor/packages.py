"""Python and the packages: required ones are imported, extras are only searched for. Needs no torch."""

import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

from core import __version__
from core.extras import EXTRAS
from core.training.doctor.check import Check, first_line

PYTHON = (3, 11)
REQUIRED = {
    "torch": "2.11",
    "numpy": "1.26",
    "einops": "0.8",
    "tensorstore": "0.1.70",
    "zarr": "3.1",
}


def version_numbers(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu"; stops at the first component that is no number."""
    numbers = []
    for component in text.partition("+")[0].split("."):
        if not component.isdigit():
            break
        numbers.append(int(component))
    return tuple(numbers)


def packages() -> Iterator[Check]:
    """Python, this package, what it requires (imported, so that a broken one is found), and every extra."""
    python = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] >= PYTHON:
        yield Check(name="Python", value=python, status="ok", required=True)
    else:
        remedy = f"install Python {'.'.join(map(str, PYTHON))} or newer"
        yield Check(name="Python", value=python, status="missing", remedy=remedy, required=True)
    yield Check(name="paracore", value=__version__, status="ok")
    for name, minimum in REQUIRED.items():
        yield required(name, minimum)
    for distributions in EXTRAS.values():
        for name, purpose in distributions.items():
            yield optional(name, purpose)


def required(name: str, minimum: str) -> Check:
    """A package without which nothing runs: imported, and new enough."""
    remedy = f"pip install '{name}>={minimum}'"
    # imported: a package may be installed and still not load (another C library, another numpy)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            value = "not installed"
        else:
            value = f"does not import: {error}"
        return Check(name=name, value=value, status="missing", remedy=remedy, required=True)
    except Exception as error:
        # a library that it needs is of another version
        value = f"does not import: {type(error).__name__}: {first_line(error)}"
        remedy = f"pip install --force-reinstall '{name}>={minimum}'"
        return Check(name=name, value=value, status="missing", remedy=remedy, required=True)
    installed = str(getattr(module, "__version__", None) or _version(name) or "?")
    if version_numbers(installed) and version_numbers(installed) < version_numbers(minimum):
        value = f"{installed}, older than {minimum}"
        return Check(name=name, value=value, status="missing", remedy=remedy, required=True)
    if name == "torch":
        installed += _build_kind(module)
    return Check(name=name, value=installed, status="ok", required=True)


def optional(name: str, purpose: str) -> Check:
    """A package of an extra: whether it is installed, without the time of its import."""
    try:
        is_installed = find_spec(name) is not None
    except ValueError:  # somebody put None into sys.modules
        is_installed = False
    if is_installed:
        return Check(name=name, value=_version(name) or "installed", status="ok")
    value = f"not installed ({purpose})"
    return Check(name=name, value=value, status="off", remedy=f"pip install {name}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _build_kind(torch: ModuleType) -> str:
    for kind in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, kind, None)
        if version:
            return f", built for {kind} {version}"
    return ", built for the CPU"
