"""What a step tells its stages, and what a stage remembers of a microbatch between its forward and its W."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from core.autograd import GradSync, Notes, WeightGradBag
from core.autograd.recomputation.module_state import StateBefore
from core.pipeline.run.checks.step_numbers import Draws
from core.pipeline.run.step import LossFn


@dataclass(frozen=True)
class StepContext:
    """What every stage needs to know about a step.

    step: its number. first_microbatch: the global index of this replica's first one. microbatches: the cut batch.
    loss_fn: None where the model's outputs are asked for. training: whether backward follows.
    sync: collects and reduces the gradients. draws: seeds torch's generators for each call of a stage. forward: which
    call without gradients since the last step.
    """

    step: int
    first_microbatch: int
    microbatches: list[Any]
    loss_fn: LossFn | None
    sync: GradSync
    training: bool = False
    loss_scale: float | Tensor = 1.0
    draws: Draws = field(default_factory=Draws)
    forward: int = 0

    def __post_init__(self) -> None:
        # an optimizer notices whether its scale scales anything: on a rank without a loss this is all that does
        if isinstance(self.loss_scale, Tensor):
            object.__setattr__(self, "loss_scale", self.loss_scale.expand(self.loss_scale.shape))


@dataclass(eq=False)
class MicrobatchState:
    """What one microbatch leaves in a stage between its F and its W.

    received: the output of the previous stage. Its tensors that want a gradient are `input_leaves` of this stage's
    graph.
    output_edges: one per output tensor that wants a gradient: where that enters the graph, None if it has no
    graph. An edge instead of the tensor, so that the output's memory is freed at once.
    """

    received: Any
    input_leaves: list[Tensor]
    global_index: int
    bag: WeightGradBag
    output_edges: list[GradientEdge | None] = field(default_factory=list)
    # per output tensor, as the next stage was told
    outputs_want_grad: list[bool] = field(default_factory=list)
    # on the last stage: what backward starts from
    loss_gradient: list[Tensor] = field(default_factory=list)
    # in-place write counters before F, compared by R
    input_versions: list[int] = field(default_factory=list)
    # buffers and attributes before F
    modules_before: StateBefore = field(default_factory=StateBefore)
    # magnitudes of F's outputs, the first few times that R follows
    first_outputs: list[Tensor | None] = field(default_factory=list)
    notes: Notes | None = None  # what F noted for R
    writable_copy: Any = None  # of (received, microbatch), for an F that may write into them
