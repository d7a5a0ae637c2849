"""The loop, its configuration, metrics and report.

Names are loaded at first use, so that `python -m core.training.report` does not wait for models and checkpoints.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "config": (
        "CheckpointConfig",
        "DataConfig",
        "DataParallelConfig",
        "ModelConfig",
        "PipelineConfig",
        "TrainingConfig",
    ),
    "evaluate": ("evaluate_bits_per_byte", "next_token_loss"),
    "loop": ("train",),
    "rules": ("check_run",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {sorted(_HOME)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
