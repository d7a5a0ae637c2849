"""torch.optim.SGD on flat buffers."""

from core.optimizer.config import OptimizerConfig
from core.optimizer.kernels import Kernel, sgd
from core.optimizer.sharded import ShardedOptimizer
from core.parallel_state.layout import Layout


class ShardedSGD(ShardedOptimizer):
    """torch.optim.SGD (fused), decay added to the gradient as there: state momentum_buffer, none at momentum 0."""

    def kernel(self, config: OptimizerConfig) -> Kernel:
        """SGD's."""
        return sgd(config)

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """The momentum, if there is one."""
        return ("momentum_buffer",) if self.config.momentum else ()
