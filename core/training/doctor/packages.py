"""Python and the packages: required ones are imported, extras are only looked for. Needs no torch."""

import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

from core.training.doctor.check import Check, first_line

PYTHON = (3, 11)
REQUIRED = {"torch": "2.11", "numpy": "1.26", "einops": "0.8", "tensorstore": "0.1.70", "zarr": "3.1"}
# extra -> {distribution: what it is for}
EXTRAS = {
    "train": {
        "tokenizers": "training and loading tokenizers; without it text is bytes",
        "tyro": "flags of the command line",
        "rich": "the progress bar",
        "matplotlib": "report.png",
        "jinja2": "report.html",
        "tomli_w": "writing configuration files",
    },
    "data": {
        "pyarrow": "reading .parquet",
        "datasets": "reading Hugging Face data sets",
        "zstandard": "reading .zst",
    },
    "log": {"tensorboard": "TensorBoard's curves", "wandb": "Weights & Biases, offline or not"},
    "deepspeed": {"hjson": "a ds_config.json with comments"},
    "sign": {"cryptography": "signatures of checkpoints"},
}


def version_numbers(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu"; stops at the first part that is no number."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def packages() -> Iterator[Check]:
    """Python, this package, what it requires (imported, so that a broken one is found), and every extra."""
    text, least = platform.python_version(), ".".join(map(str, PYTHON))
    enough = sys.version_info[:2] >= PYTHON
    remedy = None if enough else f"install Python {least} or newer"
    where = f"{text} at {sys.executable}"
    yield Check(name="Python", value=where, status="ok" if enough else "missing", remedy=remedy, required=True)
    ours = _version("paracore")
    value = ours or "the source tree alone; its version is not known"
    yield Check(
        name="paracore", value=value, status="ok" if ours else "info", remedy=None if ours else "pip install -e ."
    )
    for name, least in REQUIRED.items():
        yield required(name, least)
    for extra, parts in EXTRAS.items():
        for name, purpose in parts.items():
            yield optional(name, extra, purpose)


def required(name: str, least: str) -> Check:
    """A package without which nothing runs: imported, and new enough."""
    remedy = f"pip install '{name}>={least}'"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        what = "not installed" if error.name == name else f"does not import: {error}"
        return Check(name=name, value=what, status="missing", remedy=remedy, required=True)
    except Exception as error:  # a library that it needs is of another version
        what = f"does not import: {type(error).__name__}: {first_line(error)}"
        remedy = f"pip install --force-reinstall '{name}>={least}'"
        return Check(name=name, value=what, status="missing", remedy=remedy, required=True)
    found = str(getattr(module, "__version__", None) or _version(name) or "?")
    if version_numbers(found) and version_numbers(found) < version_numbers(least):
        value = f"{found}, older than {least}"
        return Check(name=name, value=value, status="missing", remedy=remedy, required=True)
    return Check(name=name, value=found + (_build(module) if name == "torch" else ""), status="ok", required=True)


def optional(name: str, extra: str, purpose: str) -> Check:
    """A package of an extra: whether it is there, without the time of its import."""
    try:
        there = find_spec(name) is not None
    except ValueError:  # somebody put None in its place
        there = False
    if there:
        return Check(name=name, value=_version(name) or "installed", status="ok")
    value = f"not installed ({purpose})"
    return Check(name=name, value=value, status="off", remedy=f"pip install 'paracore[{extra}]'")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _build(torch: ModuleType) -> str:
    for kind in ("cuda", "hip", "xpu"):
        if version := getattr(torch.version, kind, None):
            return f", built for {kind} {version}"
    return ", built for the CPU"
