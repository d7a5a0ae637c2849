"""Notices who updates a `DataParallel`'s parameters without our optimizers: torch's, or a program by hand.

torch's optimizers step on each replica by itself. They are right as long as every rank gives them the same gradients
and rates, so ranks meet once before each of their steps. Who updates by `torch.autograd.grad` and writes into the
parameters calls nothing of ours but the next forward: there weights are compared, if they were written and no
gradient was summed since the forward before.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.data_parallel.agreement import BITS, Agreement, options_of
from core.data_parallel.buffers.buffers import Buffer
from core.data_parallel.buffers.gradient import BucketGradient, ParameterSlot, fetch_all, slot_of
from core.data_parallel.buffers.life import Phase
from core.data_parallel.refusals import RootHook, refuse_sparse, refuse_unknown
from core.parallel_state.by_hand.functions import called_by_program
from core.parallel_state.collectives.checks import checksum
from core.parallel_state.environment import reading_waits
from core.parallel_state.optimizer_steps import after_optimizer_steps, before_optimizer_steps


class UpdateWatch:
    """Hooks on torch's optimizers and on the stages' forwards.

    take_weights: adopts what the program wrote.
    """

    def __init__(
        self,
        agreement: Agreement,
        buffers: Sequence[Buffer],
        stages: Sequence[nn.Module],
        slots: Sequence[ParameterSlot],
        take_weights: Callable[[], None],
    ) -> None:
        self._agreement = agreement
        self._buffers = buffers
        self._stages = stages
        # whose first step has begun
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._slots = slots
        self._take_weights = take_weights
        self._forwards = 0
        self._optimizer_steps = 0
        # of the agreement, at the last forward and at the last look
        self._meetings = self._meetings_at_look = 0
        self._versions = 0
        # ranks met in the last forward, after `.data` was written or not: what differed there must be gone
        self._met_in_forward = self._met_by_values = False
        # checksums of the weights
        self._seen: Tensor | None = None
        # those that torch's optimizers have stepped, of gradients that are summed, and the number of those gradients
        self._stepped: set[ParameterSlot] = set()
        self._stepped_of = 0
        # the optimizer whose step runs, and the gradients' number: what it calls itself has met with it
        self._outermost: tuple[torch.optim.Optimizer, int] | None = None
        self._hooks: list[Any] = [after_optimizer_steps(self._after_optimizer)]
        if agreement.is_shared:
            # torch's registry must not keep this alive, nor a deep copy have its hooks
            weak_self = weakref.ref(self)

            @torch.compiler.disable
            def before_forward(module: nn.Module, args: Any) -> None:
                if (watch := weak_self()) is not None:
                    watch._before_forward(module)

            hook = RootHook(before_forward)
            self._hooks += [stage.register_forward_pre_hook(hook) for stage in stages]
            self._hooks.append(before_optimizer_steps(self._before_optimizer))

    def remove(self) -> None:
        """Take the hooks out."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # torch's optimizers

    def _is_within(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether another optimizer's step calls this one's, on some parameters: torch's ZeroRedundancyOptimizer."""
        if self._outermost is None:
            return False
        outermost, step = self._outermost
        return optimizer is not outermost and step == self._slots[0].step

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_within(optimizer):
            return
        self._outermost = None
        self._agreement.in_optimizer = False
        if not self._slots:
            return
        sums = self._slots[0].sums
        # our own say it themselves
        if hasattr(optimizer, "shard") or sums.phase is not Phase.SUMMED:
            self._stepped.clear()
            return
        if self._stepped_of != self._slots[0].step:
            self._stepped.clear()
            self._stepped_of = self._slots[0].step
        for group in optimizer.param_groups:
            self._stepped.update(slot for p in group["params"] if (slot := slot_of(p)) is not None)
        if all(slot in self._stepped for slot in self._slots if slot.delivered):
            sums.phase = Phase.KEPT

    @torch.no_grad()
    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """All ranks meet: the same options, the same gradients that were put in by hand, the same weights.

        A parameter that only other ranks reached has a gradient here too, as under DDP.
        Raises ValueError, on every rank, before anything is updated.
        """
        # our optimizers meet with the gradient norm
        if not self._slots or hasattr(optimizer, "shard") or self._is_within(optimizer):
            return
        sums = self._slots[0].sums
        slots = []
        outside = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slot = slot_of(parameter)
                if slot is None:
                    outside.append(parameter)
                elif slot.sums is sums:
                    slots.append(slot)
        if not slots:
            self._refuse_added(optimizer, outside)
            return
        if optimizer not in self._optimizers:
            refuse_sparse(optimizer, self._stages)
            self._optimizers.add(optimizer)
        changes = 0.0
        missing = []
        summed = None
        # what another optimizer has used up the closure computes anew (Adam, then LBFGS)
        is_used = sums.phase is Phase.STEPPED and _has_closure(args, kwargs)
        for position, slot in enumerate(slots):
            with torch._C.DisableTorchFunctionSubclass():
                gradient = slot.parameter.grad
            if gradient is None or is_used:
                missing.append(slot)
            elif type(gradient) is BucketGradient:
                summed = slot
            elif not reading_waits(gradient.device):
                changes = (changes + (position + 1) * (float(checksum(gradient)) + 1)) % (1 << 50)
        self._optimizer_steps += 1
        look = self._met_in_forward or not self._optimizer_steps & (self._optimizer_steps - 1)
        self._met_in_forward = False
        if look:
            self._take_weights()
        if summed is not None:
            summed.request_values()
        self._give_gradients(slots, missing, optimizer, changes, look, len(outside))
        if look and outside:
            self._agreement.compare_outside(outside, type(optimizer).__name__)
        # ranks have just met: it may read all weights, and nobody waits in vain
        stepped = {id(slot.parameter) for slot in slots}
        for buffer in self._buffers:
            if buffer.stage == 3 and any(id(p) in stepped for p in buffer.parameters):
                buffer.lend(by_all=True)
        # now, while all are here: some read their own parameters' only, each rank others (distributed Muons)
        if summed is not None:
            fetch_all([slot for slot in slots if slot.parameter.grad is slot.gradient])
        self._outermost = (optimizer, self._slots[0].step)
        self._agreement.in_optimizer = True

    def _refuse_added(
        self, optimizer: torch.optim.Optimizer, outside: Sequence[nn.Parameter]
    ) -> None:
        """Before its first step. Raises ValueError: adapters that were put in since, alone in their optimizer, get
        gradients that nobody sums."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            inside = {
                id(p) for stage in self._stages for p in stage.parameters() if p.requires_grad
            }
            refuse_unknown(inside.intersection(map(id, outside)), self._stages)

    def _give_gradients(
        self,
        slots: Sequence[ParameterSlot],
        missing: Sequence[ParameterSlot],
        optimizer: torch.optim.Optimizer,
        changes: float,
        look: bool,
        num_outside: int,
    ) -> None:
        words = [0] * self._agreement.num_words
        number_of = {slot: number for number, slot in enumerate(self._slots)}
        for slot in missing:
            word, bit = divmod(number_of[slot], BITS)
            words[word] |= 1 << bit
        kind = type(optimizer).__name__
        everyone = self._agreement.meet(
            f"{kind}.step()",
            [kind, num_outside, *map(number_of.__getitem__, slots)],
            self._optimizer_steps - 1,
            options=options_of(optimizer.param_groups),
            changes=self._slots[0].sums.changes.take(self._agreement.device) + changes,
            words=words,
            look=look,
        )
        # nothing is read, which would wait for a device
        if not missing:
            return
        missing_everywhere = [[int(word) for word in other.tolist()] for other in everyone]
        for slot in missing:
            word, bit = divmod(number_of[slot], BITS)
            if any(not other[word] >> bit & 1 for other in missing_everywhere) and slot.sums.phase:
                slot.shown = True
                slot.parameter.grad = slot.gradient

    # updates by hand

    def before_reshard(self) -> None:
        """A program has had whole weights, and may have written them, which every rank must do alike.

        Executors have not. Raises ValueError, on every rank: one wrote other values.
        """
        if self._slots and self._agreement.is_shared and called_by_program(sys._getframe(2)):
            self._take_weights()
            self._agreement.meet("reshard", "reshard", self._slots[0].step, look=True)

    def _before_forward(self, module: nn.Module) -> None:
        """Raises ValueError, on every rank: weights were written since the last forward, with other values."""
        if not (module.training and torch.is_grad_enabled()) or module not in self._stages:
            return
        # a recomputation
        if torch._C._current_graph_task_id() != -1:
            return
        # a transform of torch.func, which would refuse writes to what is outside of it
        if torch._C._are_functorch_transforms_active():
            self._refuse_freed_weights()
            with torch._C._DisableFuncTorch():
                self._look_for_updates()
        else:
            self._look_for_updates()

    def _look_for_updates(self) -> None:
        """Weights that ranks wrote differently are refused in the second forward, or at an optimizer's step.

        Sharpness-aware minimization (arXiv 2010.01412) moves them by a rank's own gradient for one forward, and back.
        """
        agreement = self._agreement
        self._forwards += 1
        versions = sum([buffer.versions for buffer in self._buffers])
        met = agreement.meetings
        written = versions != self._versions and met == self._meetings and self._forwards > 1
        self._versions = versions
        self._meetings = met
        is_power_of_two = not self._forwards & (self._forwards - 1)
        by_values = not written and (self._met_by_values or is_power_of_two)
        if by_values:
            written = self._look_at_values()
        self._met_by_values = by_values and written
        if written and not (self._slots and self._slots[0].sums.has_executor):
            self._take_weights()
            agreement.meet(
                "a forward, after weights were written by hand",
                "forward",
                self._forwards - 1,
                look=True,
                may_pass=True,
            )
            self._meetings = self._meetings_at_look = agreement.meetings
            self._met_in_forward = True

    def _refuse_freed_weights(self) -> None:
        """Raises ValueError: weights of ZeRO stage 3 cannot come and go inside of a transform."""
        if any(buffer.stage == 3 for buffer in self._buffers):
            raise ValueError(
                "a forward inside of a transform of torch.func (functorch: grad, vmap, jvp, jacrev) at zero_stage=3: "
                "weights are gathered and freed in it, which these refuse; use zero_stage=2, or a loop over the "
                "samples with torch.autograd.grad"
            )

    def _look_at_values(self) -> bool:
        """Whether weights are others than at the last look, and ranks have not met since; `.data` has no versions."""
        if reading_waits(self._agreement.device):
            return False
        self._take_weights()
        checksums = [
            checksum(buffer.values) for buffer in self._buffers if buffer.whole_for_program
        ]
        met = self._meetings_at_look
        self._meetings_at_look = self._agreement.meetings
        before = self._seen
        self._seen = torch.stack(checksums) if checksums else None
        if self._forwards == 1 or self._seen is None or met != self._agreement.meetings:
            return False
        return before is None or not torch.equal(before, self._seen)


def _has_closure(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a step was given what computes its gradients. args: begin with the optimizer."""
    return any(callable(x) for x in (*args[1:], kwargs.get("closure")))
