"""torch.optim.SGD on flat buffers."""

from typing import Any

from core.optimizer.config import OptimizerConfig
from core.optimizer.sharded import ShardedOptimizer
from core.optimizer.state.kernels import sgd
from core.parallel_state.layout import Layout


class ShardedSGD(ShardedOptimizer):
    """torch.optim.SGD (fused), decay added to the gradient as there: state momentum_buffer, none at momentum 0."""

    kernel = staticmethod(sgd)

    def options(self, config: OptimizerConfig) -> dict[str, Any]:
        """As torch.optim.SGD names them."""
        return {
            "lr": config.lr,
            "momentum": config.first_momentum,
            "weight_decay": config.weight_decay,
        }

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """The momentum, if there is one."""
        if self.config.first_momentum:
            return ("momentum_buffer",)
        return ()
