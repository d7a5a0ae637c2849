"""Linear layers split over one process group (Megatron-LM, arXiv 1909.08053, section 3).

Shapes: s sequence, b microbatch, i input features, o output features, tp size of the group.
"""

from math import prod

from torch import Tensor

from core.autograd import deferred_linear, has_main_grad
from core.parallel_state import Init, Layout, layout_of
from core.parallel_state.spread import SpreadModule
from core.tensor_parallel.groups_by_dims import watch_bias
from core.tensor_parallel.low_rank import LowRank
from core.tensor_parallel.mappings import gather_from_tensor_region, sum_gradient
from core.tensor_parallel.own_modules import PlacedModule
from core.tensor_parallel.placement import Placement

_GATHERED_ROWS = (
    ". Under sequence_parallel dim 0 is the sequence, [s/tp, b, h]: ColumnParallelLinear gathers it from the tensor "
    "ranks; rows [b, s, h] want sequence_parallel=False"
)


def _wrong_width(x: Tensor, weight: Tensor, layer: str, wanted: str) -> ValueError:
    full_width = layout_of(weight).shape[-1]
    return ValueError(
        f"{layer} got width {x.shape[-1]}, {list(x.shape)}, and takes {weight.shape[-1]} of {full_width}: {wanted}"
    )


class ColumnParallelLinear(PlacedModule):
    """y = x W^T + b with the output features split: each rank has its own columns of y.

    x: [s, b, i] the same on every rank ([s/tp, b, i] under sequence parallelism) -> y: [s, b, o/tp], or
    [s, b, o] on every rank with `gather_output`.
    weight: [o/tp, i]. `output_size` may be several dims, of which `split_dim` is split (gate and up:
    (2, f) with dim 1); the weight keeps them, y has them flattened.
    Forward: all-gather of x (sequence parallelism only). Backward: all-gather of x again for the weight gradient
    (sequence parallelism only: gathered activations are not kept), all-reduce (reduce-scatter) of dx beside the
    weight gradient's matmul.
    Raises ValueError: the split dim does not divide over the group.
    """

    stands_for = "Linear"

    def __init__(
        self,
        input_size: int,
        output_size: int | tuple[int, ...],
        *,
        place: Placement | None = None,
        bias: bool = True,
        init: Init = Init(std=0.02),
        split_dim: int = 0,
        gather_output: bool = False,
    ) -> None:
        super().__init__()
        place = place or Placement()
        sizes = (output_size,) if isinstance(output_size, int) else tuple(output_size)
        split = {"tp": split_dim}
        # The layout is the only statement of the split: initial values, checkpoints and norms follow from it.
        self.weight = place.parameter(Layout((*sizes, input_size), split), init)
        self.bias = place.parameter(Layout(sizes, split), Init()) if bias else None
        # what is added to y (`core.models.lora`)
        self.adapter: LowRank | None = None
        self.stage = place.stage
        self.fp8 = place.fp8
        self.comm = place.column_comm()
        self.gathers_output, self.group = gather_output, place.group
        self.split_dim = split_dim
        self.split_output = None if gather_output else split_dim
        self.place_in(place.own_modules)
        # of a model, and of modules over several ranks, all parameters are looked at
        is_alone = place.own_modules is None and not place.filled_by_model
        if is_alone and self.bias is not None and self.bias.dim() > 1:
            watch_bias(self)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i] -> [s, b, o/tp] (see the class)."""
        weight = self.weight
        if x.shape[-1] != weight.shape[-1]:
            raise _wrong_width(
                x, weight, "ColumnParallelLinear", "all input features, the same on every rank"
            )
        y = deferred_linear(x, weight, self.bias, stage=self.stage, comm=self.comm, fp8=self.fp8)
        if self.adapter is not None:
            y = y + self.adapter(x)
        if not self.gathers_output:
            return y
        # Columns of a rank are contiguous only along `split_dim`: gather along it, then flatten again.
        first = y.dim() - 1
        by_dim = y.unflatten(-1, weight.shape[:-1]).movedim(first + self.split_dim, -1)
        whole = gather_from_tensor_region(by_dim, self.group)
        # a tied table of `VocabParallelEmbedding`, whose rows are padded
        if padding := layout_of(weight).padding.get(self.split_dim):
            whole = whole.narrow(-1, 0, whole.shape[-1] - padding)
        return whole.movedim(-1, first + self.split_dim).flatten(first)

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[-1]}, out={prod(self.weight.shape[:-1])} here, bias={self.bias is not None}"


class RowParallelLinear(PlacedModule):
    """y = sum over ranks of x_r W_r^T, plus b once, with the input features split.

    x: [s, b, i/tp], each rank its own columns -> y: [s, b, o] the same on every rank ([s/tp, b, o] under
    sequence parallelism). weight: [o, i/tp]; the bias is in full on every rank, and so is its gradient.
    Forward: all-reduce (reduce-scatter) of y. Backward: all-gather of dy (sequence parallelism only).
    Raises ValueError: the input features do not divide over the group.
    """

    input_is_split = True
    stands_for = "Linear"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        place: Placement | None = None,
        bias: bool = True,
        init: Init = Init(std=0.02),
    ) -> None:
        super().__init__()
        place = place or Placement()
        self.weight = place.parameter(Layout((output_size, input_size), {"tp": 1}), init)
        # Added once, after the sum over ranks, so it is whole on every rank.
        self.bias = place.parameter(Layout((output_size,)), Init()) if bias else None
        # what is added to y (`core.models.lora`)
        self.adapter: LowRank | None = None
        self.stage = place.stage
        self.fp8 = place.fp8
        self.comm = place.row_comm()
        self.splits_sequence = place.splits_sequence
        self.place_in(place.own_modules)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i/tp] -> [s, b, o] (see the class)."""
        weight = self.weight
        if x.shape[-1] != weight.shape[-1]:
            raise _wrong_width(
                x,
                weight,
                "RowParallelLinear",
                "this rank's part of the input features: the output of a "
                "ColumnParallelLinear without gather_output, or scatter_to_tensor_region(x, group)"
                + _GATHERED_ROWS
                * self.splits_sequence,
            )
        y = deferred_linear(x, weight, self.bias, stage=self.stage, comm=self.comm, fp8=self.fp8)
        if self.adapter is not None:
            y = y + self.adapter(x)
        return y

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[-1]} here, out={self.weight.shape[0]}, bias={self.bias is not None}"


class ReplicatedLinear(SpreadModule):
    """y = x W^T with W [o, i] whole on every rank: [s, b, i] -> [s, b, o], [s/tp, b, ...] of sequence shards.

    No collective in forward. A rank that sees its shard of the sequence has a partial gradient of W, as its layout
    says; without sequence parallelism all ranks see the same x, and must give y the same gradient.
    """

    def __init__(
        self, input_size: int, output_size: int, *, place: Placement, init: Init = Init(std=0.02)
    ) -> None:
        super().__init__()
        layout = Layout((output_size, input_size), partial=place.sequence_partial)
        self.weight = place.parameter(layout, init)
        self.stage = place.stage
        self.fp8 = place.fp8
        self.group = place.group if place.splits_sequence else None

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i] -> [s, b, o] (see the class)."""
        weight = self.weight
        # whoever owns gradients sums them once per step, and weight gradients can wait
        is_owned = has_main_grad(weight) or hasattr(weight, "take_main_grad")
        if self.group is not None and not is_owned:
            weight = sum_gradient(weight, self.group)  # type: ignore[assignment]
        return deferred_linear(x, weight, stage=self.stage, fp8=self.fp8)

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[1]}, out={self.weight.shape[0]}, whole on every rank"
