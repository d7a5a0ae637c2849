"""The executor: one loop over the actions of one rank. What a schedule says is what happens, in that order."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.pipeline.run.messages.channel import Channel
from core.pipeline.run.microbatch import StepContext
from core.pipeline.run.ranges import named, profiled
from core.pipeline.run.stage import Stage
from core.pipeline.schedule.actions import Action
from core.pipeline.schedule.lower import RankPlan
from core.pipeline.schedule.memory import MemoryWatch
from core.pipeline.schedule.timeline import Event, Measured


class Clock:
    """Starts and ends of actions: process time on a CPU, events on the device's own stream elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # (action, start, end)
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
        """All actions and the end of the step, in seconds since the clock was made; waits for the device."""
        if self._device.type == "cpu":

            def seconds(moment: Any) -> float:
                return float(moment - self.begin)
        else:
            torch.accelerator.synchronize(self._device)

            def seconds(moment: Any) -> float:
                # elapsed_time is in milliseconds
                return float(self.begin.elapsed_time(moment)) / 1e3

        events = tuple(
            Event(action, seconds(start), seconds(end)) for action, start, end in self._marks
        )
        return Measured(events, seconds(self._end))


class Executor:
    """Runs a rank's plan for one batch.

    stages: this rank's stages by index.
    outputs: by microbatch, on the rank of the last stage: [2] sums of loss and tokens, or the output without a loss.
    watch: counts bytes, in the measured step of the automatic schedule.
    """

    def __init__(
        self,
        plan: RankPlan,
        stages: Mapping[int, Stage],
        channel: Channel,
        step: StepContext,
        watch: MemoryWatch | None = None,
    ) -> None:
        self.plan = plan
        self.stages = stages
        self.channel = channel
        self.step = step
        self._watch = watch
        self.outputs: dict[int, Any] = {}
        self.current_action: Action | None = None
        # activations and gradients that wait on this rank: (F or B, stage that will take it, microbatch)
        self._pending: dict[tuple[str, int, int | None], Any] = {}
        self._recomputed = {
            (action.stage, action.microbatch) for action in plan.order if action.kind == "R"
        }

    def run(self, clock: Clock) -> None:
        """Every action in order, then wait until everything sent has arrived."""
        compute: Callable[[Action], None] = self._compute
        communicate: Callable[[Action], None] = self._communicate
        if profiled():
            compute = self._named(compute)
            communicate = self._named(communicate)
        # given in one step only, so that all others pay nothing
        if self._watch is not None:
            compute = partial(self._compute_watched, self._watch)
        try:
            for action in self.plan.order:
                self.current_action = action
                if action.kind in "FIWR":
                    start = clock.now()
                    compute(action)
                    clock.add(action, start)
                else:
                    communicate(action)
            self.current_action = None
            self.channel.finish()
        except BaseException:
            # messages under way would keep connections open, and peers waiting
            self.channel.drop()
            raise

    def _named(self, run: Callable[[Action], None]) -> Callable[[Action], None]:
        """`run` inside a range of the action's name, such as F2.5 (stage 2, microbatch 5), for a profiler."""

        def run_in_range(action: Action) -> None:
            kind, stage, microbatch = action
            with named(f"{kind}{stage}" if microbatch is None else f"{kind}{stage}.{microbatch}"):
                run(action)

        return run_in_range

    @property
    def position(self) -> str:
        """Stage, microbatch and action under way, for the report of a failure."""
        if self.current_action is None:
            return "after its last action"
        kind, stage, microbatch = self.current_action
        position = f"stage {stage}"
        if microbatch is not None:
            position += f", microbatch {microbatch}"
        return f"{position}, action {kind} ({self.current_action})"

    def _compute_watched(self, watch: MemoryWatch, action: Action) -> None:
        kind, stage, microbatch = action
        assert microbatch is not None

        def run() -> tuple[Any, Any]:
            self._compute(action)
            if kind == "F":
                handed_on = self._pending.get(("F", stage + 1, microbatch))
            else:
                handed_on = self._pending.get(("B", stage - 1, microbatch))
            if kind == "I":
                return handed_on, self.stages[stage].tensors_until_weight_grad(microbatch)
            leaves_graph = kind == "R" or (stage, microbatch) not in self._recomputed
            return handed_on, leaves_graph

        received = None
        if kind in "FI":
            direction = "F" if kind == "F" else "B"
            received = self._pending.get((direction, stage, microbatch))
        watch.around(
            action, self.stages[stage].module, self.step.microbatches[microbatch], received, run
        )

    def _compute(self, action: Action) -> None:
        kind, index, microbatch = action
        assert microbatch is not None
        stage = self.stages[index]
        step = self.step
        match kind:
            case "F":
                # activation checkpointing: where an R follows, F keeps no graph
                keep_graph = step.training and (index, microbatch) not in self._recomputed
                received = self._pending.pop(("F", index, microbatch), None)
                output = stage.forward(microbatch, received, step, keep_graph=keep_graph)
                if not stage.last:
                    self._pending["F", index + 1, microbatch] = output
                elif keep_graph or not step.training:
                    self.outputs[microbatch] = output
            case "R":
                output = stage.recompute(microbatch, step)
                if stage.last:
                    self.outputs[microbatch] = output
            case "I":
                if stage.last:
                    output_grads = None
                else:
                    output_grads = self._pending.pop(("B", index, microbatch))
                input_grads = stage.input_gradients(microbatch, output_grads, step)
                if not stage.first:
                    self._pending["B", index - 1, microbatch] = input_grads
            case "W":
                stage.weight_gradients(microbatch, step)

    def _communicate(self, action: Action) -> None:
        kind, stage, microbatch = action
        sync = self.step.sync
        match kind:
            case "RECV_F" | "RECV_B":
                self._pending[kind[-1], stage, microbatch] = self.channel.take(action)
            case "SEND_F":
                self.channel.send(action, self._pending.pop(("F", stage + 1, microbatch)))
            case "SEND_B":
                self.channel.send(action, self._pending.pop(("B", stage - 1, microbatch)))
            case "REDUCE_GRAD":  # after the last W of a stage: its buckets are full
                sync.stage_done(self.stages[stage].module)
            case "UNSHARD":  # ZeRO-3: all-gather this stage's weights
                sync.unshard(self.stages[stage].module)
            case "RESHARD":
                sync.reshard(self.stages[stage].module)

    def total(self, device: torch.device) -> Tensor:
        """[2] loss and tokens of all microbatches; zeros on ranks without the last stage."""
        # in the order of microbatches, not of the schedule: float sums must not depend on the schedule
        sums = [self.outputs[microbatch] for microbatch in sorted(self.outputs)]
        if not sums:
            return torch.zeros(2, dtype=torch.float64, device=device)
        return torch.stack(sums).sum(0)
