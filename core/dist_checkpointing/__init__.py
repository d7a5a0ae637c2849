"""The whole state on disk in an open format, whatever the mesh. Names are loaded at first use: the writer program
and the command line import this package without torch."""

from importlib import import_module
from typing import Any

_HOME = {
    "ShardedTensor": "state.mapping",
    "ShardedObject": "state.mapping",
    "sharded_state_dict": "state.mapping",
    "save": "writing.saving",
    "load": "reading.loading",
    "load_common_state_dict": "reading.loading",
    "load_plain_tensors": "reading.loading",
    "lazy_tensors": "reading.lazy",
    "load_tensors_metadata": "reading.loading",
    "CheckpointManager": "manager",
    "Root": "publish.root",
    "register": "state.leaves",
    "Source": "state.names",
    "Concat": "state.names",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
