"""What an executor says to whoever reduces gradients: facts of the schedule, no hooks needed."""

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import nn
from torch.nn import Parameter


class StepListener(Protocol):
    """A part of a model that wants to know where optimizer steps begin and end; see `StageContext.listeners`."""

    def begin_step(self) -> None:
        """Before the first forward of a step."""
        ...

    def end_step(self) -> None:
        """After the last backward; called on all ranks, so that it may be collective."""
        ...


class GradSync:
    """One gradient over many replicas. The executor calls these in the order of its schedule; each does nothing by
    default.

    A parameter's gradient is complete when every (stage, microbatch) pair that holds it has delivered, and in
    the last pair every thunk of its bag has run; whatever has not arrived by `stage_done` is flushed there.
    """

    def begin_step(self, pairs_per_param: Mapping[Parameter, int], *, split: bool = False) -> None:
        """A step starts; how many (stage, microbatch) pairs hold each parameter.

        split: each pair has a W of its own after its I; otherwise one backward does both.
        """

    def before_forward(self, stage: nn.Module) -> None:
        """Before F or R of `stage`: its parameters must be whole."""

    def before_input_grad(self, stage: nn.Module) -> None:
        """Before I of `stage`."""

    def after_input_grad(self, stage: nn.Module, waiting: Collection[Parameter] = ()) -> None:
        """After I of `stage`: W needs only inputs and output gradients, parameters may be freed.

        waiting: the parameters with thunks in this pair's bag, whose contribution is not complete yet.
        """

    def before_weight_grad(self, stage: nn.Module) -> None:
        """Before W of a pair of `stage`, where it is apart from I."""

    def ready(self, param: Parameter) -> None:
        """One pair has delivered its whole contribution to `param`."""

    def after_weight_grad(self, stage: nn.Module) -> None:
        """One pair of `stage` has delivered all that it will: after its W, or after a backward that is not split."""

    def stage_done(self, stage: nn.Module) -> None:
        """The last W of `stage` has run: flush what has not arrived."""

    def unshard(self, stage: nn.Module) -> None:
        """From now until `reshard` the parameters of `stage` stay whole (UNSHARD in a schedule)."""

    def reshard(self, stage: nn.Module) -> None:
        """The end of `unshard` (RESHARD)."""

    def finish(self) -> None:
        """The step's last action has run: when this returns every gradient is summed."""


class NullGradSync(GradSync):
    """One replica, nothing to sum; also the plain twin that tests compare against."""
