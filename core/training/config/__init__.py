"""What a run is told: frozen parts, `RunConfig` of all of them, and where its values come from.

    python -m core.training.config --explain run.toml      # every field: value, origin, meaning; what is wrong
    python -m core.training.config --template run.toml     # a commented file with every field

Nothing here needs a process group, or the code that trains.
"""

from core.models.lora.config import LoraConfig
from core.training.config.across import same_on_all_ranks
from core.training.config.data import DataConfig
from core.training.config.parts import (
    CheckpointConfig,
    DataParallelConfig,
    PipelineConfig,
    TrainingConfig,
)
from core.training.config.run import ConfigError, RunConfig
from core.training.config.sources import Loaded, load_run
from core.training.model.config import DTYPES, ModelConfig
from core.training.preferences.config import DPOConfig

__all__ = [
    "DTYPES",
    "CheckpointConfig",
    "ConfigError",
    "DPOConfig",
    "DataConfig",
    "DataParallelConfig",
    "Loaded",
    "LoraConfig",
    "ModelConfig",
    "PipelineConfig",
    "RunConfig",
    "TrainingConfig",
    "load_run",
    "same_on_all_ranks",
]
