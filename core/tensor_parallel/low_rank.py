"""scale * B A x beside a split linear: what LoRA trains instead of the matrix (arXiv 2106.09685).

Shapes: s sequence, b microbatch, i input features, o output features, r rank, tp size of the group. Nothing wider
than the rank is sent: the sums that the split makes necessary are over [s, b, r].
"""

from math import prod, sqrt

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.autograd import deferred_linear, has_main_grad
from core.autograd.products import NO_COMM, matrix_of
from core.parallel_state import Init, Layout, layout_of
from core.parallel_state.spread import SpreadModule
from core.tensor_parallel.mappings import sum_gradient
from core.tensor_parallel.placement import Placement


class LowRank(SpreadModule):
    """The two factors of one split linear's matrix [o..., i]: lora_A [r, i] and lora_B [o..., r].

    Beside a column-parallel linear A is whole on every rank and B is split as the matrix is, [o/tp..., r]; beside a
    row-parallel one A is split, [r, i/tp], and B whole. Under sequence parallelism the whole one meets this rank's
    tokens only, and its gradient is partial over tp, as its layout says.
    A begins uniform in +-1/sqrt(i) (Kaiming, as torch's linears), B as zeros, so that nothing changes at first.

    base: the layout of the matrix. dropout: of x, before A. Raises ValueError: a rank above the matrix's sizes.
    """

    def __init__(
        self,
        base: Layout,
        rank: int,
        *,
        place: Placement,
        scale: float,
        dropout: nn.Module | None = None,
    ) -> None:
        super().__init__()
        outputs = base.shape[:-1]
        inputs = base.shape[-1]
        if not 1 <= rank <= min(prod(outputs), inputs):
            raise ValueError(
                f"rank={rank} of a matrix [{prod(outputs)}, {inputs}]: use 1 to {min(prod(outputs), inputs)}"
            )
        self.splits_input = base.split.get("tp") == len(base.shape) - 1
        whole = place.sequence_partial
        if self.splits_input:
            layout_a, layout_b = (
                Layout((rank, inputs), {"tp": 1}),
                Layout((*outputs, rank), partial=whole),
            )
            self.comm_a = place.row_comm()
            self.comm_b = NO_COMM
        else:
            layout_a, layout_b = (
                Layout((rank, inputs), partial=whole),
                Layout((*outputs, rank), base.split),
            )
            self.comm_a = NO_COMM
            self.comm_b = place.column_comm()
        self.lora_A = place.parameter(layout_a, Init(bound=1 / sqrt(inputs)))
        self.lora_B = place.parameter(layout_b, Init())
        self.rank = rank
        self.scale = scale
        self.dropout = dropout
        self.stage = place.stage
        self.group = place.group if whole else None

    def forward(self, x: Tensor) -> Tensor:
        """The linear's x -> what is added to its y: [s, b, o/tp] column-parallel, else [s, b, o] ([s/tp, b, o])."""
        if self.dropout is not None:
            x = self.dropout(x)
        a = self.lora_A
        b = self.lora_B
        if self.splits_input:
            b = self._summed(b)
        else:
            a = self._summed(a)
        low = deferred_linear(x, a, stage=self.stage, comm=self.comm_a) * self.scale
        return deferred_linear(low, b, stage=self.stage, comm=self.comm_b)

    def _summed(self, parameter: Parameter) -> Parameter:
        """With its gradient summed over tp: by who owns it once per step, else in backward, where nothing waits."""
        owned = has_main_grad(parameter) or hasattr(parameter, "take_main_grad")
        if self.group is None or owned:
            return parameter
        summed: Parameter = sum_gradient(parameter, self.group)  # type: ignore[assignment]
        return summed

    @torch.no_grad()
    def folded(self, weight: Tensor) -> Tensor:
        """weight + scale * B A, this rank's part of the matrix; no collective."""
        return fold(weight, self.lora_A, self.lora_B, self.scale)

    def extra_repr(self) -> str:
        shape = layout_of(self.lora_B).shape
        inputs = layout_of(self.lora_A).shape[-1]
        return f"in={inputs}, out={prod(shape[:-1])}, rank={self.rank}, scale={self.scale:g}"


@torch.no_grad()
def fold(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """[o..., i] + scale * [o..., r] @ [r, i]: the product in float32 at least, rounded once to the weight's dtype."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    product = matrix_of(b).to(wide) @ a.to(wide)
    return (weight.to(wide) + scale * product.view(weight.shape)).to(weight.dtype)
