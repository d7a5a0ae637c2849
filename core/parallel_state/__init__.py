"""Who am I, who are my peers, how is each tensor spread, which seed is mine; and every collective call.

Names are loaded at first use, so that the pure parts (`config`, `grid`) import without torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "ParallelConfig": "config",
    "Grid": "grid",
    "Layout": "layout",
    "layout_of": "layout",
    "Init": "initial",
    "initialize_parameters": "initial",
    "ParallelState": "state",
    "mix32": "random",
    "seeded": "random",
    "launch": "torchrun",
    "initialize_model_parallel": "current",
    "current_state": "current",
    "model_parallel_is_initialized": "current",
    "destroy_model_parallel": "current",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    if name.startswith(("get_", "is_")):  # Megatron's getters, over the current state
        getters = import_module(f"{__name__}.getters")
        if hasattr(getters, name):
            return getattr(getters, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
