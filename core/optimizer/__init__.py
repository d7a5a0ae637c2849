"""The optimizer step over sharded and replicated parameters: AdamW (also of 8 bits), SGD, Muon, Lion, LAMB, Adafactor
over flat buffers, mixed precision with main weights, gradient clipping by the global norm, learning-rate schedules,
offloading.

Names are loaded at first use: a configuration is read without the code that trains.
"""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from core.optimizer.adamw import ShardedAdamW as ShardedAdamW
    from core.optimizer.adamw import ShardedAdamW8bit as ShardedAdamW8bit
    from core.optimizer.build import build_optimizer as build_optimizer
    from core.optimizer.config import OptimizerConfig as OptimizerConfig
    from core.optimizer.lion import ShardedLion as ShardedLion
    from core.optimizer.muon import ShardedMuon as ShardedMuon
    from core.optimizer.schedules.schedule import LearningRate as LearningRate
    from core.optimizer.sgd import ShardedSGD as ShardedSGD
    from core.optimizer.sharded import ShardedOptimizer as ShardedOptimizer
    from core.optimizer.state.offload import Offload as Offload
    from core.optimizer.state.sharded_states import OptimizerShard as OptimizerShard
    from core.optimizer.state.sharded_states import sharded_state_dict as sharded_state_dict
    from core.optimizer.step.clip_grads import GradScaler as GradScaler
    from core.optimizer.step.clip_grads import clip_grad_norm_ as clip_grad_norm_
    from core.optimizer.step.clip_grads import get_grad_norm as get_grad_norm
    from core.optimizer.step.step_stats import StepStats as StepStats
    from core.optimizer.whole.adafactor import ShardedAdafactor as ShardedAdafactor
    from core.optimizer.whole.lamb import ShardedLamb as ShardedLamb
else:
    __getattr__, __dir__ = lazy_exports(__name__)
