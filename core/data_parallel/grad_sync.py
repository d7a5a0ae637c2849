"""When buckets are summed: contributions are counted, and buckets start in one order on all ranks.

A round is a step (stages 0, 1), or one (stage, microbatch) pair (stages 2, 3), of one pipeline stage. In it each
bucket starts once: when all its parameters have arrived and all buckets before it have started, or when the round
ends. So ranks that run different branches still call the same collectives in the same order, and nothing waits for
ever.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.data_parallel.buffers.buffers import Buffer
from core.data_parallel.buffers.gradient import BucketGradient, ParameterSlot, part_of, put_back
from core.data_parallel.buffers.life import Phase

IN_FLIGHT = 2  # sums under way at once: each holds a bucket's scratch, at stages 2 and 3 whole gradients


def at_the_end(call: Callable[[], None]) -> None:
    """Of the backward that runs: `call()`, unless it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class Round:
    """The buckets of one stage, in the order in which they are completed.

    A backward completes them from the last layer to the first. A W of its own empties its bag from the end, that is
    from the first layer to the last; norms, which no bag holds, then come last.
    """

    def __init__(self, buffers: Sequence[Buffer], started: list[Buffer]) -> None:
        split = sorted(reversed(buffers), key=lambda buffer: buffer.bucket.vector)
        self._orders = {False: list(buffers), True: split}
        self._under_way, self.open = started, False
        self._left: dict[Buffer, int] = {}
        self._started: set[Buffer] = set()
        self.buffers = self._orders[False]
        self._next = 0

    def begin(self, *, split: bool) -> None:
        """A new round: nothing has arrived, no sum has started."""
        self.open, self._next, self.buffers = True, 0, self._orders[split]
        self._left = {buffer: len(buffer.parameters) for buffer in self.buffers}
        self._started.clear()

    def arrived(self, buffer: Buffer) -> bool:
        """One parameter of `buffer` is complete. Returns whether all of them are."""
        self._left[buffer] = left = self._left[buffer] - 1
        return left == 0

    def advance(self) -> None:
        """Start what is complete, up to the first bucket that is not."""
        while self._next < len(self.buffers) and self._left[self.buffers[self._next]] <= 0:
            self._start(self.buffers[self._next])

    def has(self, buffer: Buffer) -> bool:
        """Whether `buffer` is counted here now. Raises LookupError: it is too late, its sum has started."""
        if not self.open or buffer not in self._left:
            return False
        if buffer in self._started:
            raise LookupError
        return True

    def end(self) -> None:
        """The round is over: start the sums that wait for parameters which will not arrive."""
        if self.open:
            for buffer in self.buffers[self._next :]:
                self._start(buffer)
            self.open = False

    def _start(self, buffer: Buffer) -> None:
        self._next += 1
        self._started.add(buffer)
        if len(self._under_way) >= IN_FLIGHT and buffer.holds_scratch:
            self._under_way.pop(0).wait_sum()
        buffer.start_sum()
        self._under_way.append(buffer)


class GradientSums:
    """Counts the contributions of one step, and sums; see `core.autograd.GradSync` for who calls what.

    holders[stage]: the buckets of each stage. places: of every parameter. divided: a round is a pair (stages 2, 3).
    passes: of a plain loop, how many backward calls make a step, if that is known. wanted, zero: called where
    somebody asks for values of gradients, and where all were set to None.
    """

    def __init__(
        self,
        holders: dict[nn.Module, list[Buffer]],
        places: Sequence[ParameterSlot],
        *,
        divided: bool,
        overlap: bool,
        passes: int | None,
        wanted: Callable[[], None],
        zero: Callable[[], None],
    ) -> None:
        self.places, self.wanted, self.zero = places, wanted, zero
        # by id: torch hashes tensors in Python
        self._place = {id(place.parameter): place for place in places}
        self._divided, self._overlap, self._passes = divided, overlap, passes
        self._under_way: list[Buffer] = []
        often = [b for buffers in holders.values() for b in buffers]
        shared = set() if divided else {b for b in often if often.count(b) > 1}
        self._shared = Round([b for b in dict.fromkeys(often) if b in shared], self._under_way)
        mine = {stage: [b for b in buffers if b not in shared] for stage, buffers in holders.items()}
        self._rounds = {stage: Round(buffers, self._under_way) for stage, buffers in mine.items()}
        self._running = next(iter(self._rounds.values()), self._shared)  # of the backward or W under way
        self._stage_of = {b: stage for stage, buffers in reversed(holders.items()) for b in buffers}
        round_of = {b: r for r in (*self._rounds.values(), self._shared) for b in r.buffers}
        for place in places:
            place.sums = self
            place.round = None if divided else round_of[place.buffer]
        self._hooked: list[ParameterSlot] = []
        self.phase = Phase.OPEN
        self._begin_plain()

    def _begin_plain(self) -> None:
        """A step that nobody has announced."""
        self.split, self._driven, self._summed, self._hooked = False, False, False, []
        self._counts = self._passes is not None and not self._divided
        for place in self.places:
            place.delivered, place.pairs = False, self._passes or 1
        if self._counts:
            self._begin_rounds()

    def _begin_rounds(self) -> None:
        for each in (*self._rounds.values(), self._shared):
            each.begin(split=self.split)

    def begin_step(self, pairs: Mapping[Parameter, int], split: bool) -> None:
        """An executor takes over for a step. Raises ValueError: the step before was never finished."""
        if self._driven:
            raise ValueError(
                "DataParallel: the last step began and did not finish (an exception?): its part of the gradients is "
                "still here; call zero_grad() before the next"
            )
        self.split, self._counts, self._driven, self._hooked = split, not self._divided, True, []
        counts = {id(parameter): count for parameter, count in pairs.items()}
        for place in self.places:
            place.delivered, place.pairs = False, counts.get(id(place.parameter), 1)
        if self._counts:
            self._begin_rounds()

    def unknown(self, parameters: Iterable[Tensor]) -> set[int]:
        """The ids of those that are summed by nobody."""
        return set(map(id, parameters)) - self._place.keys()

    @property
    def driven(self) -> bool:
        """Whether an executor has announced this step."""
        return self._driven

    @property
    def known(self) -> Collection[int]:
        """The ids of those that are summed here."""
        return self._place.keys()

    def hooked(self, place: ParameterSlot, parameter: Tensor) -> None:
        """Autograd is done with `parameter` in this backward: `.grad`, or None where operations added themselves.

        Raises RuntimeError: its bucket has been summed already.
        """
        gradient = parameter.grad
        if place.unit is not None:
            place.unit.to_come -= 1
        added = type(gradient) is BucketGradient  # by `contribute`
        if self.phase and not self._renewed() and self.phase.drops(place.name):
            parameter.grad = place.gradient if added else None
            return
        if not added:
            if place.shown:  # somebody has set it to None since
                place.buffer.forget(place.index)
            if gradient is not None:
                self.contribute(place, gradient)
            place.shown = not self._driven
            if parameter.dtype != place.gradient.dtype:
                place.buffer.refuse_moved()
            parameter.grad = place.gradient if place.shown else None
        place.delivered = True
        if self.split:
            self._hooked.append(place)
        else:
            self._arrive(place)

    def contribute(self, place: ParameterSlot, gradient: Tensor) -> None:
        """Add to the gradient of a parameter, inside of a backward."""
        if self.phase:  # `hooked`, which follows, knows what becomes of it
            return
        if self._divided and not (self._driven or self._running.open):  # nobody saw this backward begin
            self.plain_backward(self._stage_of[place.buffer])
        place.buffer.add(place.index, gradient.detach())

    def _renewed(self) -> bool:
        """Whether somebody has set every `.grad` to None since the last step, so that the next one has begun."""
        with torch._C.DisableTorchFunctionSubclass():
            for place in self.places:
                if type(place.parameter.grad) is BucketGradient:
                    return False
        self.zero()
        return True

    def refuse_second(self) -> None:
        """Raise ValueError: gradients are summed and used once, and nobody has zeroed them since."""
        if self.phase and not self._renewed():
            self.phase.refuse_second()

    def show(self) -> None:
        """After the last sum: `.grad` of every parameter that has a gradient stands for it."""
        with torch._C.DisableTorchFunctionSubclass():
            for place in self.places:
                if place.delivered and not place.shown:
                    place.shown, place.parameter.grad = True, place.gradient

    def take(self, factor: float) -> bool:
        """Before an update: what somebody has made of `.grad` is what counts; None is no gradient.

        factor: what a whole gradient is multiplied by. Returns whether there are fewer or more gradients than before.
        """
        changed = False
        others = [(place, gradient.place.fetched()) for place, gradient in self.borrowed()]
        for place, whole in others:  # all were fetched before: two may have been exchanged
            put_back(place, whole, factor)
            place.parameter.grad = place.gradient
            place.whole, changed, place.delivered = None, True, True
        with torch._C.DisableTorchFunctionSubclass():
            for place in self.places:
                gradient = place.parameter.grad
                if type(gradient) is BucketGradient:
                    if place.whole is not None:
                        put_back(place, place.whole, factor)
                elif gradient is not None:
                    put_back(place, gradient, factor)
                    changed, place.delivered = True, True
                elif place.shown:
                    part_of(place).zero_()
                    changed, place.delivered, place.zeros = True, False, False
        return changed

    def borrowed(self) -> list[tuple[ParameterSlot, BucketGradient]]:
        """The parameters whose `.grad` was set to what another's is. Raises RuntimeError: to that of another step."""
        found = []
        with torch._C.DisableTorchFunctionSubclass():
            for place in self.places:
                gradient = place.parameter.grad
                if type(gradient) is BucketGradient and gradient.place is not place:
                    gradient.check_step()
                    found.append((place, gradient))
        return found

    def _arrive(self, place: ParameterSlot, *, now: bool = True) -> None:
        """One pair has delivered all to a parameter; `now`: buckets may start."""
        which, buffer = place.round or self._running, place.buffer
        try:
            counted = which.has(buffer)
        except LookupError:
            raise RuntimeError(
                f"{place.name} had one more contribution after its bucket was summed (one per backward was expected"
                f"{f', {self._passes} backward calls per step' if self._passes else ''}); use overlap=False, or say "
                "how many backward calls make a step (backward_passes)"
            ) from None
        if self._counts:
            place.pairs -= 1
            if place.pairs:
                return
        if counted and which.arrived(buffer) and now:
            self._advance(which)

    def _advance(self, which: Round) -> None:
        if self._overlap and which is not self._shared:  # of two stages: when both are complete
            which.advance()

    def backward_begins(self, stage: nn.Module) -> None:
        """A backward of `stage` that is not split, with stages 2, 3: a round."""
        if self._divided and not self.split:
            self._rounds[stage].end()
            self._wait()
            self._begin(stage)

    def plain_backward(self, stage: nn.Module) -> bool:
        """Inside of a backward that no executor has announced: it has begun. Returns whether that is so."""
        if not self._driven and (not self.phase or self._renewed()):  # what comes in another phase is in no sum
            self.backward_begins(stage)
            if self._divided:
                at_the_end(self._rounds[stage].end)
        return not self._driven

    def _begin(self, stage: nn.Module) -> None:
        self._summed, self._running = True, self._rounds[stage]
        self._running.begin(split=self.split)

    def after_input_grad(self, waiting: Collection[Parameter]) -> None:
        """What came by a hook and does not come again in W is complete (stages 2, 3: with the round)."""
        hooked, self._hooked = self._hooked, []
        if hooked and not self._divided:
            late = {id(parameter) for parameter in waiting}
            for place in hooked:
                if id(place.parameter) not in late:
                    self._arrive(place, now=False)  # in W, where all ranks are at the same stage

    def ready(self, parameter: Parameter) -> None:
        """W has added the last of this pair to it."""
        place = self._place[id(parameter)]
        place.delivered = True
        self._arrive(place)

    def before_weight_grad(self, stage: nn.Module) -> None:
        """Stages 2, 3: W of a pair is a round."""
        if self._divided:
            self._begin(stage)

    def after_weight_grad(self, stage: nn.Module) -> None:
        """A pair is complete."""
        if self._divided:
            self._rounds[stage].end()
            self._wait()
        else:
            self._advance(self._rounds[stage])

    def stage_done(self, stage: nn.Module) -> None:
        """A stage is complete."""
        if not self._divided:
            self._rounds[stage].end()

    def finish(self) -> None:
        """Start what has not started, wait for all."""
        if not (self._counts or self._summed):
            self._begin_rounds()
        for each in (*self._rounds.values(), self._shared):
            each.end()
        self._wait()
        self.phase = Phase.SUMMED

    def _wait(self) -> None:
        for buffer in self._under_way:
            buffer.wait_sum()
        self._under_way.clear()

    def give_up(self) -> None:
        """What was added is not wanted: complete the sums that have begun, as every rank does.

        Sums under way read and write gradients; and which of a round's have started may differ between ranks.
        """
        if any(place.delivered for place in self.places):
            for each in (*self._rounds.values(), self._shared):
                each.end()
        self._wait()

    def zeroed(self, *, set_to_none: bool) -> None:
        """The next step begins."""
        with torch._C.DisableTorchFunctionSubclass():
            for place in self.places:
                place.zeros = not set_to_none and (place.delivered or place.zeros)
                place.whole = None
                if set_to_none:
                    place.parameter.grad, place.shown = None, False
                place.renew()
        self.phase = Phase.OPEN
        self._begin_plain()
