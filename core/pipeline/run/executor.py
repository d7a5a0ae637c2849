"""One loop over the actions of one rank: what a schedule says is what happens, in that order."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.pipeline.run.channel import Channel
from core.pipeline.run.stage import Stage, StepFacts
from core.pipeline.schedule.actions import Action
from core.pipeline.schedule.lower import RankPlan
from core.pipeline.schedule.memory import MemoryWatch
from core.pipeline.schedule.timeline import Event, Measured


class Clock:
    """Starts and ends of actions: of the process on a CPU, of the device's own stream elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Action, Any, Any]] = []
        self.begin = self._end = self.now()

    def now(self) -> Any:
        """A moment: seconds, or an event of the device, which nobody waits for here."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def add(self, action: Action, start: Any) -> None:
        """`action` began at `start` and has just ended."""
        self._marks.append((action, start, self.now()))

    def stop(self) -> None:
        """The step has ended, here and on all other ranks."""
        self._end = self.now()

    def measured(self) -> Measured:
        """What was added, in seconds since the clock was made, and when it was stopped; waits for the device."""
        if self._device.type == "cpu":

            def since(mark: Any) -> float:
                return float(mark - self.begin)
        else:
            torch.accelerator.synchronize(self._device)

            def since(mark: Any) -> float:
                return float(self.begin.elapsed_time(mark)) / 1e3

        return Measured(tuple(Event(a, since(start), since(end)) for a, start, end in self._marks), since(self._end))


class Executor:
    """Runs a rank's plan for one batch.

    stages: the stages of this rank by index. outputs[m]: what the last stage gave for microbatch m, on the rank
    that has it: [2] sums with a loss, else the output. where: what is under way, for the report of a failure.
    watch: counts bytes, in a step for the automatic schedule.
    """

    def __init__(
        self,
        plan: RankPlan,
        stages: Mapping[int, Stage],
        channel: Channel,
        facts: StepFacts,
        watch: MemoryWatch | None = None,
    ) -> None:
        self.plan, self.stages, self.channel, self.facts = plan, stages, channel, facts
        self._watch = watch
        self.outputs: dict[int, Any] = {}
        self.doing: Action | None = None
        self._here: dict[tuple[str, int, int | None], Any] = {}  # (F or B, stage that needs it, microbatch)
        self._again = {(a.stage, a.microbatch) for a in plan.order if a.kind == "R"}

    def run(self, clock: Clock) -> None:
        """Every action in order, then wait until what was sent has arrived."""
        compute = self._compute if self._watch is None else partial(self._watched, self._watch)
        for action in self.plan.order:
            self.doing = action
            if action.kind in "FIWR":
                start = clock.now()
                compute(action)
                clock.add(action, start)
            else:
                self._communicate(action)
        self.doing = None
        self.channel.finish()

    @property
    def where(self) -> str:
        """Stage, microbatch and action under way, in words."""
        if self.doing is None:
            return "after its last action"
        kind, stage, microbatch = self.doing
        of = "" if microbatch is None else f", microbatch {microbatch}"
        return f"stage {stage}{of}, action {kind} ({self.doing})"

    def _watched(self, watch: MemoryWatch, action: Action) -> None:
        kind, s, m = action
        assert m is not None

        def run() -> tuple[Any, Any]:
            self._compute(action)
            handed = self._here.get(("F", s + 1, m) if kind == "F" else ("B", s - 1, m))
            return handed, self.stages[s].waiting(m) if kind == "I" else (s, m) not in self._again or kind == "R"

        received = self._here.get(("F" if kind == "F" else "B", s, m)) if kind in "FI" else None
        watch.around(action, self.stages[s].module, self.facts.parts[m], received, run)

    def _compute(self, action: Action) -> None:
        kind, s, m = action
        assert m is not None
        stage, facts = self.stages[s], self.facts
        match kind:
            case "F":
                keep = facts.training and (s, m) not in self._again
                output = stage.forward(m, self._here.pop(("F", s, m), None), facts, keep=keep)
                if not stage.last:
                    self._here["F", s + 1, m] = output
                elif keep or not facts.training:
                    self.outputs[m] = output
            case "R":
                output = stage.recompute(m, facts)
                if stage.last:
                    self.outputs[m] = output
            case "I":
                gradients = None if stage.last else self._here.pop(("B", s, m))
                found = stage.input_gradients(m, gradients, facts)
                if not stage.first:
                    self._here["B", s - 1, m] = found
            case "W":
                stage.weight_gradients(m, facts)

    def _communicate(self, action: Action) -> None:
        kind, s, m = action
        match kind:
            case "RECV_F" | "RECV_B":
                self._here[kind[-1], s, m] = self.channel.take(action)
            case "SEND_F" | "SEND_B":
                self.channel.send(action, self._here.pop((kind[-1], s + (1 if kind == "SEND_F" else -1), m)))
            case "REDUCE_GRAD":
                self.facts.sync.stage_done(self.stages[s].module)
            case "UNSHARD":
                self.facts.sync.unshard(self.stages[s].module)
            case "RESHARD":
                self.facts.sync.reshard(self.stages[s].module)

    def sums(self, device: torch.device) -> Tensor:
        """[2] loss and tokens of all microbatches; zeros where the last stage is not."""
        found = [self.outputs[m] for m in sorted(self.outputs)]
        return torch.stack(found).sum(0) if found else torch.zeros(2, dtype=torch.float64, device=device)
