"""The feed-forward part: one column-parallel and one row-parallel linear around an activation."""

from torch import Tensor, nn

from core.parallel_state import Init
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from core.transformer.activations import gated
from core.transformer.spec import Build


class MLP(nn.Module):
    """x [s, b, h] -> [s, b, h] ([s/tp, b, h] each way under sequence parallelism).

    linear_fc1.weight [f/tp, h], or gated [2, f/tp, h]: gate, then up, so that tensor parallelism is a plain
    slice of both. linear_fc2.weight [h, f/tp].
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.gated = config.gated_linear_unit
        self.activation = config.activation
        # Splitting fc1 by columns and fc2 by rows needs one sum over the ranks per MLP, after fc2: the activation
        # works on each rank's own columns (Megatron-LM, arXiv 1909.08053, section 3).
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            (2, config.ffn) if self.gated else config.ffn,
            split_dim=1 if self.gated else 0,
            place=build.place,
            bias=config.add_bias_linear,
            init=Init(std=config.init_method_std),
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn,
            config.hidden_size,
            place=build.place,
            bias=config.add_bias_linear,
            init=Init(
                std=config.output_std
            ),  # smaller with depth: it writes to the residual stream
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear_fc1(x)
        return self.linear_fc2(gated(y, self.activation) if self.gated else self.activation(y))
