"""The loop, its configuration, metrics and report.

Names are loaded at first use: a configuration is read, and refused, without the code that trains.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.training.config import CheckpointConfig as CheckpointConfig
    from core.training.config import DataConfig as DataConfig
    from core.training.config import DataParallelConfig as DataParallelConfig
    from core.training.config import Loaded as Loaded
    from core.training.config import ModelConfig as ModelConfig
    from core.training.config import PipelineConfig as PipelineConfig
    from core.training.config import RunConfig as RunConfig
    from core.training.config import TrainingConfig as TrainingConfig
    from core.training.config import load_run as load_run
    from core.training.config import same_on_all_ranks as same_on_all_ranks
    from core.training.config.rules import check_run as check_run
    from core.training.run.evaluate import evaluate_bits_per_byte as evaluate_bits_per_byte
    from core.training.run.evaluate import next_token_loss as next_token_loss
    from core.training.run.facade import Initialized as Initialized
    from core.training.run.facade import initialize as initialize
    from core.training.run.loop import train as train

_HOME = {
    "CheckpointConfig": "config",
    "DataConfig": "config",
    "DataParallelConfig": "config",
    "Loaded": "config",
    "ModelConfig": "config",
    "PipelineConfig": "config",
    "RunConfig": "config",
    "TrainingConfig": "config",
    "load_run": "config",
    "same_on_all_ranks": "config",
    "evaluate_bits_per_byte": "run.evaluate",
    "next_token_loss": "run.evaluate",
    "Initialized": "run.facade",
    "initialize": "run.facade",
    "train": "run.loop",
    "check_run": "config.rules",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
