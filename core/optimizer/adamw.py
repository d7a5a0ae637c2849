"""torch.optim.AdamW on flat buffers."""

from typing import Any

from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import adamw_options
from core.optimizer.sharded import ShardedOptimizer
from core.optimizer.state.kernels import adamw
from core.parallel_state.layout import Layout


class ShardedAdamW(ShardedOptimizer):
    """torch.optim.AdamW (fused, arXiv 1711.05101) on flat buffers: states exp_avg and exp_avg_sq."""

    kernel = staticmethod(adamw)

    def options(self, config: OptimizerConfig) -> dict[str, Any]:
        """As torch.optim.AdamW names them."""
        return adamw_options(config)

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """Adam's two moments, exp_avg and exp_avg_sq."""
        return "exp_avg", "exp_avg_sq"
