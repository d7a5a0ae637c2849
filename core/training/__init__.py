"""The loop, its configuration, metrics and report."""

from core.training.config import (
    CheckpointConfig,
    DataConfig,
    DataParallelConfig,
    ModelConfig,
    PipelineConfig,
    TrainingConfig,
)
from core.training.evaluate import evaluate_bits_per_byte, next_token_loss
from core.training.loop import train
from core.training.rules import check_run

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DataParallelConfig",
    "ModelConfig",
    "PipelineConfig",
    "TrainingConfig",
    "check_run",
    "evaluate_bits_per_byte",
    "next_token_loss",
    "train",
]
