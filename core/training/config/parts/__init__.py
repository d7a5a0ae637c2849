"""The settings of a run beside model and data, in small frozen dataclasses; no setting stands in two of them.

Plain values: files and the command line are read into them.
"""

from core.training.config.parts.checkpoint import CHANGES, METRICS, CheckpointConfig
from core.training.config.parts.data_parallel import DataParallelConfig
from core.training.config.parts.pipeline import PipelineConfig
from core.training.config.parts.training import TrainingConfig

__all__ = [
    "CHANGES",
    "METRICS",
    "CheckpointConfig",
    "DataParallelConfig",
    "PipelineConfig",
    "TrainingConfig",
]
