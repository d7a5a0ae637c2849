"""Megatron's optimizer over ours: main weights, clipping by the global norm, states divided over the data ranks."""

from core.interop.megatron.absent import absent_names
from core.interop.megatron.optimizer.build import get_megatron_optimizer as get_megatron_optimizer
from core.interop.megatron.optimizer.build import (
    get_standard_config_overrides as get_standard_config_overrides,
)
from core.interop.megatron.optimizer.optimizer import ChainedOptimizer as ChainedOptimizer
from core.interop.megatron.optimizer.optimizer import MegatronOptimizer as MegatronOptimizer
from core.interop.megatron.optimizer.optimizer_config import (
    AdamOptimizerConfig as AdamOptimizerConfig,
)
from core.interop.megatron.optimizer.optimizer_config import OptimizerConfig as OptimizerConfig
from core.interop.megatron.optimizer.optimizer_config import ParamKey as ParamKey
from core.interop.megatron.optimizer.optimizer_config import (
    SGDOptimizerConfig as SGDOptimizerConfig,
)

__getattr__ = absent_names(__name__)
