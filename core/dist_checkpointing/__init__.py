"""The whole state on disk in an open format, whatever the mesh. Names are loaded at first use: the writer program
and the command line import this package without torch."""

from importlib import import_module
from typing import Any

_HOME = {
    "ShardedTensor": "mapping",
    "ShardedObject": "mapping",
    "sharded_state_dict": "mapping",
    "save": "saving",
    "load": "loading",
    "load_common_state_dict": "loading",
    "load_plain_tensors": "loading",
    "lazy_tensors": "lazy",
    "load_tensors_metadata": "loading",
    "CheckpointManager": "manager",
    "Root": "root",
    "register": "leaves",
    "Source": "names",
    "Concat": "names",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
