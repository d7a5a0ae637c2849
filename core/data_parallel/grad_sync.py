"""When buckets are reduced: contributions are counted, and buckets start in one order on all ranks.

A round is a step (ZeRO stages 0, 1), or one (pipeline stage, microbatch) pair (ZeRO stages 2, 3). In it each bucket
starts once: when all its parameters are complete and all buckets before it have started, or when the round ends.
Therefore ranks that take different branches still call the same collectives in the same order, and none of them can
deadlock.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.data_parallel.buffers.buffers import Buffer
from core.data_parallel.buffers.changes import ChangesByHand
from core.data_parallel.buffers.gradient import BucketGradient, ParameterSlot
from core.data_parallel.buffers.life import Phase
from core.data_parallel.buffers.norms import Scalings
from core.data_parallel.buffers.rounds import Round, after_backward
from core.data_parallel.buffers.shown import borrowed, go_on


def _gradient_hooked(slot: weakref.ref[ParameterSlot], parameter: Tensor) -> None:
    """What torch holds: weak, as Python's collector does not look into these hooks and would free no model."""
    if (living := slot()) is not None:
        living.sums.gradient_hooked(living, parameter)


class GradientSums:
    """Counts the contributions of one step, and sums; see `core.autograd.GradSync` for who calls what.

    holders[stage]: the buckets of each pipeline stage. slots: of every parameter. divided: a round is one (stage,
    microbatch) pair (ZeRO stages 2, 3). backward_passes: of a plain loop, how many backward calls make a step, if
    that is known. sum_and_average, zero_all: called where a program asks for values of gradients, and where it has
    set all of them to None; meet, before values of other ranks are asked for; unsum, where a backward adds to sums.
    """

    def __init__(
        self,
        holders: dict[nn.Module, list[Buffer]],
        slots: Sequence[ParameterSlot],
        *,
        divided: bool,
        overlap: bool,
        backward_passes: int | None,
        sum_and_average: Callable[[], None],
        meet: Callable[[str, Any], None],
        zero_all: Callable[[bool], None],
        unsum: Callable[[], None],
    ) -> None:
        self.slots = slots
        self.arrivals = 0  # of gradients, from autograd
        self.sum_and_average = sum_and_average
        self.zero_all = zero_all
        self._unsum = unsum
        self.meet = meet
        # by id: torch hashes tensors in Python
        self._slot_of = {id(slot.parameter): slot for slot in slots}
        self._divided = divided
        self._overlap = overlap
        self._backward_passes = backward_passes
        self._under_way: list[Buffer] = []
        # Buckets that several pipeline stages on this rank hold (tied weights) are complete when the step is; they
        # have a round of their own. With ZeRO stages 2 and 3 every stage sums its contribution by itself.
        uses: dict[Buffer, list[nn.Module]] = {}
        for stage, buffers in holders.items():
            for buffer in buffers:
                uses.setdefault(buffer, []).append(stage)
        shared = [buffer for buffer, stages in uses.items() if len(stages) > 1 and not divided]
        self._shared = Round(shared, self._under_way)
        self._rounds: dict[nn.Module, Round] = {}
        for stage, buffers in holders.items():
            self._rounds[stage] = Round(
                [buffer for buffer in buffers if buffer not in shared], self._under_way
            )
        # of the backward or W under way
        self._current_round = next(iter(self._rounds.values()), self._shared)
        self._stage_of = {buffer: stages[0] for buffer, stages in uses.items()}
        round_of: dict[Buffer, Round] = {}
        for round_ in (*self._rounds.values(), self._shared):
            round_of.update(dict.fromkeys(round_.buffers, round_))
        for slot in slots:
            slot.sums = self
            slot.round = None if divided else round_of[slot.buffer]
        self._hooked: list[ParameterSlot] = []
        self._told_of_graph = False
        self.phase, self.changes = Phase.OPEN, ChangesByHand()
        self.scalings = Scalings()
        # whether a part of what is to be summed has been summed before
        self.goes_on = self._adds_to_step = False
        # those that the program has zeroed since their sums ended
        self.zeroed_by_hand = set[ParameterSlot]()
        self._begin_plain()

    def _begin_plain(self) -> None:
        """Begin a step of a plain loop, which announces nothing."""
        self.split = False
        self._has_executor = self._summed = False
        self._hooked = []
        self._counts = self._backward_passes is not None and not self._divided
        for slot in self.slots:
            slot.delivered = False
            slot.pairs = self._backward_passes or 1
        if self._counts:
            self._begin_rounds()

    def _begin_rounds(self) -> None:
        for round_ in (*self._rounds.values(), self._shared):
            round_.begin(split=self.split)

    def begin_step(self, pairs: Mapping[Parameter, int], split: bool) -> None:
        """An executor takes over for a step. Raises ValueError: the step before was never finished."""
        if self._has_executor:
            raise ValueError(
                "DataParallel: the last step began and did not finish (an exception?): its part of the gradients is "
                "still here; call zero_grad() before the next"
            )
        if self._divided:
            self._wait()  # for the sums of a backward before the step (a penalty): they have the buffers
        self.split = split
        self._counts = not self._divided
        self._has_executor = True
        self._hooked = []
        counts = {id(parameter): count for parameter, count in pairs.items()}
        for slot in self.slots:
            slot.delivered = False
            slot.pairs = counts.get(id(slot.parameter), 1)
        if self._counts:
            self._begin_rounds()

    def unknown(self, parameters: Iterable[Tensor]) -> set[int]:
        """The ids of those that are summed by nobody."""
        return set(map(id, parameters)) - self._slot_of.keys()

    @property
    def has_executor(self) -> bool:
        """Whether an executor has announced this step."""
        return self._has_executor

    @property
    def known(self) -> Collection[int]:
        """The ids of those that are summed here."""
        return self._slot_of.keys()

    def hook_parameters(self) -> list[Any]:
        """Have autograd call `gradient_hooked`; what takes the hooks out."""
        hooks = []
        for slot in self.slots:
            hook = partial(_gradient_hooked, weakref.ref(slot))
            hooks.append(slot.parameter.register_post_accumulate_grad_hook(hook))
        return hooks

    def _tell_of_graph(self, slot: ParameterSlot) -> None:
        """Warn, once, of `backward(create_graph=True)`, as DDP does."""
        if not self._told_of_graph:
            self._told_of_graph = True
            warnings.warn(
                f"backward(create_graph=True): the gradient of {slot.name} is summed over the replicas without its "
                "graph, so p.grad has no derivative. Take what is derived again from torch.autograd.grad(loss, "
                "parameters, create_graph=True), and average what comes of it over "
                "parallel_state.get_data_parallel_group()",
                stacklevel=2,
            )

    def gradient_hooked(self, slot: ParameterSlot, parameter: Tensor) -> None:
        """Autograd's hook: the gradient of `parameter` is in `.grad`, or None where operations added it themselves.

        Raises RuntimeError: its bucket has been summed already.
        """
        gradient = parameter.grad
        if slot.unit is not None:
            slot.unit.missing_gradients -= 1
        # already, by `contribute`
        added = type(gradient) is BucketGradient
        if self.phase and not self._reopens() and self.phase.drops(slot.name):
            self.phase = Phase.STEPPED
            parameter.grad = slot.gradient if added else None
            return
        if not added:
            # `.grad` was shown, and the program has set it to None since
            if slot.shown:
                slot.buffer.forget(slot.index)
            if gradient is not None:
                if gradient.requires_grad:
                    self._tell_of_graph(slot)
                self.contribute(slot, gradient)
            slot.shown = not self._has_executor
            if parameter.dtype != slot.gradient.dtype:
                slot.buffer.refuse_moved()
            parameter.grad = slot.gradient if slot.shown else None
        slot.delivered = True
        self.arrivals += 1
        if self.split:
            self._hooked.append(slot)
        else:
            self._count_arrival(slot)

    def contribute(self, slot: ParameterSlot, gradient: Tensor) -> None:
        """Add to the gradient of a parameter, inside of a backward."""
        if self.phase and not self._reopens():
            # `gradient_hooked`, which follows, decides what becomes of it
            return
        # no hook saw this backward begin
        if self._divided and not (self._has_executor or self._current_round.open):
            self.plain_backward(self._stage_of[slot.buffer])
        slot.buffer.add(slot.index, gradient.detach())

    def begin_addition(self, slot: ParameterSlot) -> None:
        """An operation is about to add to the gradient of a parameter itself, before autograd's hook is called.

        Where the program has set `.grad` to None since (a plain loop's `zero_grad`), or to a tensor of its own, what
        was there goes first.
        """
        if self._has_executor:
            return
        if self.phase:
            if self._reopens() and self._divided and not self._current_round.open:
                self.plain_backward(self._stage_of[slot.buffer])
        elif slot.shown and type(slot.parameter.grad) is not BucketGradient:
            slot.buffer.forget(slot.index)
            slot.shown = False

    def _renewed(self) -> bool:
        """Whether the program has zeroed every `.grad`, or set it to None, since the last step: the next begins."""
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.slots:
                if type(slot.parameter.grad) is BucketGradient and slot not in self.zeroed_by_hand:
                    return False
        # not set to None: tensors of the program's own count
        self.zero_all(False)
        return True

    def _reopens(self) -> bool:
        """Whether a contribution that comes after the sums counts: in the next step, or in this, as under DDP.

        In this what is summed is one more contribution. Not of an executor's sums, nor after a step of ours.
        """
        if self._renewed():
            return True
        if self._has_executor or self.phase is Phase.STEPPED or borrowed(self.slots):
            return False
        go_on(self.slots, self.changes)
        self._unsum()
        # after an update it is of the next step, of which nobody has zeroed the gradients
        self._adds_to_step = self.phase is Phase.SUMMED
        self.phase, self.goes_on = Phase.OPEN, True
        self.zeroed_by_hand.clear()
        # the next sums begin with `finish`, or with rounds of their own
        self._counts = False
        return True

    def refuse_second(self) -> None:
        """Raise ValueError: gradients are summed and used once, and have not been zeroed since."""
        if self.phase and not self._renewed():
            self.phase.refuse_second()

    def _count_arrival(self, slot: ParameterSlot, *, may_start: bool = True) -> None:
        """One pair has delivered all to a parameter; may_start: complete buckets are reduced at once."""
        round_, buffer = slot.round or self._current_round, slot.buffer
        try:
            is_counted = round_.counts_now(buffer)
        except LookupError:
            if self._backward_passes:
                calls = f", {self._backward_passes} backward calls per step"
            else:
                calls = ""
            raise RuntimeError(
                f"{slot.name} had one more contribution after its bucket was summed (one per backward was expected"
                f"{calls}); use overlap=False, or say how many backward calls make a step (backward_passes)"
            ) from None
        if self._counts:
            slot.pairs -= 1
            if slot.pairs:
                return
        if is_counted and round_.count_parameter(buffer) and may_start:
            self._advance(round_)

    def _advance(self, round_: Round) -> None:
        # shared buckets wait for all their stages
        if self._overlap and round_ is not self._shared:
            round_.advance()

    def backward_begins(self, stage: nn.Module) -> None:
        """A backward of `stage` that is not split: with ZeRO stages 2, 3 a round."""
        if self._divided and not self.split:
            self._rounds[stage].end()
            self._wait()
            self._begin(stage)

    def plain_backward(self, stage: nn.Module) -> bool:
        """A backward has begun. Returns whether it is a plain loop's, which no executor has announced."""
        # in other phases the first contribution decides what becomes of it
        if not self._has_executor and (not self.phase or self._renewed()):
            self.backward_begins(stage)
            if self._divided:
                after_backward(self._rounds[stage].end)
        return not self._has_executor

    def _begin(self, stage: nn.Module) -> None:
        self._summed, self._current_round = True, self._rounds[stage]
        self._current_round.begin(split=self.split)

    def after_input_grad(self, waiting: Collection[Parameter]) -> None:
        """What came by a hook and does not come again in W is complete (ZeRO stages 2, 3: with the round)."""
        gradient_hooked, self._hooked = self._hooked, []
        if gradient_hooked and not self._divided:
            delivered_by_w = {id(parameter) for parameter in waiting}
            for slot in gradient_hooked:
                if id(slot.parameter) not in delivered_by_w:
                    # sums start in W, where all ranks are at the same stage
                    self._count_arrival(slot, may_start=False)

    def ready(self, parameter: Parameter) -> None:
        """W has added the last contribution of this pair to `parameter`."""
        slot = self._slot_of[id(parameter)]
        slot.delivered = True
        self._count_arrival(slot)

    def before_weight_grad(self, stage: nn.Module) -> None:
        """ZeRO stages 2, 3: W of a pair is a round."""
        if self._divided:
            self._begin(stage)

    def after_weight_grad(self, stage: nn.Module) -> None:
        """A (stage, microbatch) pair is complete."""
        if self._divided:
            self._rounds[stage].end()
            self._wait()
        else:
            self._advance(self._rounds[stage])

    def stage_done(self, stage: nn.Module) -> None:
        """All microbatches of a stage are complete."""
        if not self._divided:
            self._rounds[stage].end()

    @property
    def is_counted(self) -> bool:
        """Whether this step was finished before: its sums are there, or a backward adds to them."""
        return self.phase is not Phase.OPEN or self._adds_to_step

    def finish(self) -> None:
        """Start the sums that have not started, and wait for all."""
        if self.goes_on:
            # a rank that has read alone is alone here, too
            self.meet("a sum of what a backward has added to sums", "sum")
        if not (self._counts or self._summed):
            self._begin_rounds()
        for round_ in (*self._rounds.values(), self._shared):
            round_.end()
        self._wait()
        self.phase, self.goes_on = Phase.SUMMED, False

    def _wait(self) -> None:
        for buffer in self._under_way:
            buffer.wait_sum()
        self._under_way.clear()

    def give_up(self) -> None:
        """Gradients of this step are not needed: complete the sums that have begun, as every rank does.

        Sums under way read and write gradients; and which of a round's have started may differ between ranks.
        """
        if any(slot.delivered for slot in self.slots):
            for round_ in (*self._rounds.values(), self._shared):
                round_.end()
        self._wait()

    def zeroed(self, *, set_to_none: bool) -> None:
        """The next step begins."""
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.slots:
                if set_to_none or (slot.shown and slot.parameter.grad is None):
                    slot.zeroed, slot.parameter.grad, slot.shown = False, None, False
                else:
                    slot.zeroed = slot.delivered or slot.zeroed
                slot.fetched = None
                slot.renew()
        self.phase, self.changes = Phase.OPEN, ChangesByHand()
        self.goes_on = self._adds_to_step = False
        self.zeroed_by_hand.clear()
        self._begin_plain()
