"""Updates that some of a pipeline's ranks made and others did not, or by other rates: each rank's own decisions.

What a program collects in `loss_fn` (losses, correct answers) is on the last stage's ranks only; a rate, a skipped
update or an early end that it makes of that leaves one model of stages that were trained differently.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.by_hand.hooked import has_hooks
from core.parallel_state.environment import reading_waits
from core.parallel_state.optimizer_steps import before_optimizer_steps
from core.parallel_state.state import ParallelState
from core.pipeline.run.checks.by_hand import READ_EVERY
from core.pipeline.run.checks.layers_by_place import LayersByPlace
from core.pipeline.run.checks.rates_by_place import (
    NO_COURSES,
    Courses,
    are_alike,
    moments,
    rates_by_place,
    share_of_zeros,
)

_SHARED = "the step's result, core.optimizer.GradScaler, core.optimizer.get_grad_norm"


class StageUpdates:
    """Finds an optimizer's step that some ranks made and others did not, or that was made by another rate.

    Whether this rank's weights were written since the last step, and by what its rate has changed, travels with the
    step's result. compares_writes: of weights in place, which a `grad_sync` makes itself.
    """

    def __init__(
        self, ps: ParallelState, modules: Sequence[nn.Module], *, compares_writes: bool = True
    ) -> None:
        self._ps = ps
        self._modules = modules
        self._compares_writes = compares_writes
        self._has_warned = False
        # of the trainable parameters, when the last step ended
        self._versions: list[int] | None = None
        self._had_gradients = False
        # when a step of several microbatches began: the versions, and the values of a weight that has hooks
        self._before_step: tuple[list[int], Tensor | None, Tensor | None] | None = None
        self._told_of_writes_inside = False
        self._step = 0
        self._differed = torch.zeros(2, dtype=torch.bool, device=ps.device)
        # of the first parameters of each optimizer
        self._rates: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()
        # since the last step: an optimizer's step, and the log of the factor by which its rate has changed
        self._has_stepped = False
        self._change: float | None = None
        # of an optimizer's first step, until they have travelled
        self._rates_by_place: Courses = NO_COURSES
        self._has_looked_at_places = self._has_read_places = False
        # of this step, and how exact it is
        self._zeros: tuple[float, float] | None = None
        self._told_of_zeros = False
        self._replicas = ps.size("dp-cp")
        self._layers = LayersByPlace(modules, self._replicas, ps.size("pp"))
        before_optimizer_steps(self._note)

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        own = {id(p) for p in self._trainable()}
        groups = [g for g in optimizer.param_groups if any(id(p) in own for p in g["params"])]
        if not groups:
            return
        self._has_stepped = True
        if not self._has_looked_at_places:
            self._has_looked_at_places = True
            self._rates_by_place = rates_by_place(self._modules, optimizer)
        rate = groups[0].get("lr")
        before = self._rates.get(optimizer)
        # a rate on a device would have to be waited for
        if not isinstance(rate, (int, float)):
            return
        self._rates[optimizer] = float(rate)
        # rates by depth differ between stages, what a schedule makes of them does not
        if before and rate > 0:
            self._change = math.log(rate / before) + (self._change or 0.0)

    def begin(self, microbatches: int) -> None:
        """A step of so many microbatches begins; 0: another call."""
        # steps 1, 2, 4, 8 ...: values of a device are waited for
        is_watched = not (self._step + 1) & self._step and self._compares_writes
        self._before_step = None
        if is_watched and microbatches > 1 and not self._told_of_writes_inside:
            trainable = self._trainable()
            # `p.data` is written without a version: of the smallest
            hooked = min(filter(has_hooks, trainable), key=Tensor.numel, default=None)
            values = hooked.detach().clone() if hooked is not None else None
            self._before_step = [p._version for p in trainable], hooked, values

    def _look_inside(self) -> None:
        """Warns of weights that were written while the step ran: an optimizer in backward."""
        before, self._before_step = self._before_step, None
        if before is None:
            return
        versions, hooked, values = before
        is_written = hooked is not None and values is not None and not torch.equal(hooked, values)
        if versions != self._versions or is_written:
            self._told_of_writes_inside = True
            warnings.warn(
                "weights were written inside of a step, by a hook that updates them in backward: other microbatches "
                "have run their forwards before it, or after it, by the schedule. Such an optimizer needs "
                "num_microbatches=1; update after the step",
                stacklevel=program_level(),
            )

    def with_numbers(self, total: Tensor) -> Tensor:
        """float64 [n] -> [n + 34], to be summed over all ranks.

        Ranks: whose weights were written, could be; with an optimizer's step, that could; with a rate, its change,
        that squared; with rates by the place of a parameter, a number of these, that squared; the same of the
        others of these, of zeros, and what `LayersByPlace` gives.
        """
        # steps 1, 2, 4, 8 ...: all weights are read
        is_watched = not (self._step + 1) & self._step
        self._zeros = share_of_zeros(self._modules) if is_watched else None
        before = self._versions
        self._versions = [p._version for p in self._trainable()]
        self._look_inside()
        written: tuple[float, float] = (0.0, 0.0)
        if self._compares_writes:
            if before and self._had_gradients and len(before) == len(self._versions):
                written = (float(before != self._versions), 1.0)
            # of this step, for the update after it: a stage may run without gradients until a step
            self._had_gradients = any(p.grad is not None for p in self._trainable())
        change = self._change or 0.0
        numbers = [
            *written,
            float(self._has_stepped),
            # a stage that is trained from this step on had none to make
            float(bool(self._versions if before is None else before)),
            float(self._change is not None),
            change,
            change * change,
            *(x for number in self._rates_by_place for x in moments(number)),
            *moments(self._zeros[0] if self._zeros is not None else None),
            *self._layers.numbers(is_watched=is_watched, is_first=self._step == 0),
        ]
        self._has_stepped, self._change = False, None
        self._rates_by_place = NO_COURSES
        return torch.cat((total, total.new_tensor(numbers)))

    def look(self, sums: Tensor) -> None:
        """Warns, once, on every rank. sums: [34], over all ranks."""
        self._step += 1
        updated, trainable, stepped, could_step, count, change, squares = sums[:7]
        *courses, zeros = sums[7:22].view(-1, 3)
        self._look_at_places(courses)
        self._look_at_zeros(zeros)
        self._layers.look(sums[22:])
        differ = (updated > 0) & (updated < trainable)
        differ |= (stepped > 0) & (stepped < could_step)
        # ranks without a change that others have, or with another
        other_rate = count * squares - change * change > 1e-9 * count * squares
        self._differed |= torch.stack((differ, other_rate))
        reads = not reading_waits(self._ps.device) or self._step % READ_EVERY == 0
        if not reads or self._has_warned or not self._differed.any():
            return
        self._has_warned = True
        if self._differed[0]:
            made, possible = (
                (updated, trainable) if 0 < updated < trainable else (stepped, could_step)
            )
            warnings.warn(
                f"step {self._step}: since the step before, weights were updated on some ranks and not on others "
                f"({int(made)} of {int(possible)} now): the model's stages are of different ages. Whether to "
                f"step must be decided by what all ranks share ({_SHARED}), not by one rank's own, as what loss_fn "
                "collects on the last stage. Of stages that are not trained on purpose: requires_grad_(False)",
                stacklevel=program_level(),
            )
            return
        warnings.warn(
            f"step {self._step}: since the step before, the learning rate was changed by another factor on some of "
            f"the {int(count)} ranks than on others: one model's stages are trained by different schedules. A rate "
            f"must be made of what all ranks share ({_SHARED}), not by one rank's own: what loss_fn collects is on "
            "the last stage only",
            stacklevel=program_level(),
        )

    def _look_at_places(self, courses: Sequence[Tensor]) -> None:
        """Warns where the stages' layers have equal rates by their place in the stage. Read in one step only.

        courses: ranks, a number, that squared, over all ranks.
        """
        if not self._has_looked_at_places or self._has_read_places:
            return
        self._has_read_places = True
        for course in courses:
            if are_alike(course, self._replicas):
                warnings.warn(
                    "the learning rates of a stage's layers, 0 of frozen ones, go by their place in the stage, and "
                    f"begin again on each of {self._ps.size('pp')} pipeline ranks: a decay by depth, the last layer "
                    "or the first half are of the whole model (layer 7 of a GPTModel is decoder.layers.7 wherever it "
                    "lives; of stages of your own add those before)",
                    stacklevel=program_level(),
                )
                return

    def _look_at_zeros(self, sums: Tensor) -> None:
        """Warns where the stages were pruned to one share of zeros, which their matrices do not have."""
        if self._zeros is None or self._told_of_zeros:
            return
        exact = self._zeros[1] / self._zeros[0]
        if are_alike(sums, self._replicas, exact):
            self._told_of_zeros = True
            warnings.warn(
                f"{self._zeros[0]:.4g} of the weights of each stage are zeros, and its matrices have more or fewer: "
                "a threshold was taken over the weights of one rank's stages, where a model has one for all. Gather "
                "what it is made of over parallel_state.get_pipeline_model_parallel_group()",
                stacklevel=program_level(),
            )

    def _trainable(self) -> list[nn.Parameter]:
        return [p for module in self._modules for p in module.parameters() if p.requires_grad]
