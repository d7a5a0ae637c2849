"""One step over parameters that are spread and repeated: AdamW, its schedule, the global gradient norm."""

from core.optimizer.adamw import AdamW, StatePart, StepStats
from core.optimizer.config import OptimizerConfig
from core.optimizer.grad_norm import squared_grad_norm
from core.optimizer.schedule import LearningRate

__all__ = ["AdamW", "LearningRate", "OptimizerConfig", "StatePart", "StepStats", "squared_grad_norm"]
