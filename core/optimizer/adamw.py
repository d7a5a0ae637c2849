"""torch.optim.AdamW on flat buffers, with moments of 32 bits or of 8."""

from typing import Any

from core.data_parallel import Buffer
from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import adamw_options
from core.optimizer.sharded import ShardedOptimizer
from core.optimizer.state.flat_shard import default_decays, parameter_shards
from core.optimizer.state.kernels import adamw
from core.optimizer.state.quantized import (
    BLOCK,
    LEAST_NUMEL,
    QUANTIZED_KINDS,
    quantized_spans,
)
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


class ShardedAdamW8bit(ShardedAdamW):
    """AdamW with moments of 8 bits (arXiv 2110.02861, as in bitsandbytes and torchao): 2.125 bytes of them, not 8.

    Each step computes in the main weights' dtype, a chunk at a time, and quantizes what it has computed: codes of the
    dynamic map, a scale for each block of 64 elements (`core.optimizer.state.quantized`). Parameters of fewer than
    4096 elements, biases and norms keep moments of 32 bits. Checkpoints are those of `ShardedAdamW`: either goes on
    from the other's, and at equal tensor ranks a restart is the same bit for bit at any ZeRO stage.
    `state` shows copies, which cannot be written to.
    """

    def quantizes(self, name: str, layout: Layout) -> bool:
        """Of matrices of at least 4096 elements; all ranks alike, because the full shape decides."""
        return layout.numel >= LEAST_NUMEL and default_decays(name, layout)

    def moments_of(self, buffer: Buffer) -> float:
        """Codes and scales in a bucket in which anything is quantized, and what is not beside them."""
        numbers = super().moments_of(buffer)
        size = buffer.updated_interval[1] - buffer.updated_interval[0]
        spans = quantized_spans(parameter_shards(buffer.segments, 0, size), self.quantizes)
        if not spans:
            return numbers
        quantized = sum(last - first for first, last in spans)
        saved = quantized / size - 1 / self._dtype.itemsize - 1 / BLOCK
        return numbers - len(QUANTIZED_KINDS) * saved
