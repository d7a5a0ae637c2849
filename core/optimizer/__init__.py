"""One step over parameters that are spread and repeated: AdamW, its schedule, the global gradient norm; the same over
flat buffers, sharded, offloaded, with SGD and Muon."""

from core.optimizer.adamw import AdamW, StatePart, StepStats
from core.optimizer.build import build_optimizer
from core.optimizer.config import OptimizerConfig
from core.optimizer.grad_norm import squared_grad_norm
from core.optimizer.muon import ShardedMuon
from core.optimizer.offload import Offload
from core.optimizer.schedule import LearningRate
from core.optimizer.sgd import ShardedSGD
from core.optimizer.sharded import ShardedAdamW, ShardedOptimizer
from core.optimizer.sharded_states import sharded_state_dict

__all__ = [
    "AdamW",
    "LearningRate",
    "Offload",
    "OptimizerConfig",
    "ShardedAdamW",
    "ShardedMuon",
    "ShardedOptimizer",
    "ShardedSGD",
    "StatePart",
    "StepStats",
    "build_optimizer",
    "sharded_state_dict",
    "squared_grad_norm",
]
