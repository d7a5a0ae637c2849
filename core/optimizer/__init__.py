"""One step over parameters that are spread and repeated: AdamW, its schedule, the global gradient norm; the same over
flat buffers, sharded, offloaded, with SGD and Muon.

Names are loaded at first use: a configuration is read without the code that trains.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.optimizer.build import build_optimizer as build_optimizer
    from core.optimizer.clip_grads import GradScaler as GradScaler
    from core.optimizer.clip_grads import clip_grad_norm_ as clip_grad_norm_
    from core.optimizer.clip_grads import get_grad_norm as get_grad_norm
    from core.optimizer.config import OptimizerConfig as OptimizerConfig
    from core.optimizer.muon import ShardedMuon as ShardedMuon
    from core.optimizer.schedules.schedule import LearningRate as LearningRate
    from core.optimizer.sgd import ShardedSGD as ShardedSGD
    from core.optimizer.sharded import ShardedAdamW as ShardedAdamW
    from core.optimizer.sharded import ShardedOptimizer as ShardedOptimizer
    from core.optimizer.state.offload import Offload as Offload
    from core.optimizer.state.sharded_states import OptimizerShard as OptimizerShard
    from core.optimizer.state.sharded_states import sharded_state_dict as sharded_state_dict
    from core.optimizer.step.step_stats import StepStats as StepStats

_HOME = {
    "OptimizerShard": "state.sharded_states",
    "StepStats": "step.step_stats",
    "build_optimizer": "build",
    "GradScaler": "clip_grads",
    "clip_grad_norm_": "clip_grads",
    "get_grad_norm": "clip_grads",
    "OptimizerConfig": "config",
    "ShardedMuon": "muon",
    "Offload": "state.offload",
    "LearningRate": "schedules.schedule",
    "ShardedSGD": "sgd",
    "ShardedAdamW": "sharded",
    "ShardedOptimizer": "sharded",
    "sharded_state_dict": "state.sharded_states",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
