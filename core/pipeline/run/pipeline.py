"""A model in stages over the pipeline ranks, trained one step at a time under any schedule."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from core.autograd import GradSync, NullGradSync
from core.parallel_state.collectives import all_gather_objects, all_reduce, broadcast
from core.parallel_state.modules import Modules, modules_of
from core.parallel_state.random import kept_generators
from core.parallel_state.state import ParallelState
from core.pipeline.run.checks.arguments import (
    AnsweredPipeline,
    ScheduleLike,
    agree,
    describe_arguments,
    recompute_policies,
    refuse_main_grad,
    refuse_nested_recompute,
    refuse_other_kinds,
    resolve_schedule,
)
from core.pipeline.run.checks.loss import LossWatch
from core.pipeline.run.checks.plain_loop import (
    BatchWatch,
    PlainLoopWatch,
    refuse_other_groups,
)
from core.pipeline.run.checks.step_numbers import NumberedSteps, StepNumbers
from core.pipeline.run.checks.sums import SumsWatch
from core.pipeline.run.executor import Clock, Executor
from core.pipeline.run.messages.connections import Connections
from core.pipeline.run.messages.failure import FailureBroadcast
from core.pipeline.run.microbatch import StepContext
from core.pipeline.run.ranges import named
from core.pipeline.run.stage import Stage
from core.pipeline.run.step import (
    Batch,
    LossFn,
    StepResult,
    evaluating,
    join_outputs,
    microbatches_of_all,
    rows_of,
    split_microbatches,
)
from core.pipeline.run.tied import check_tables, detach_tied_gradients, sum_tied_gradients
from core.pipeline.schedule.actions import Schedule
from core.pipeline.schedule.memory import StageMemory
from core.pipeline.schedule.passes import add_recompute, forward_only
from core.pipeline.schedule.player import Played, check, check_gathers, play
from core.pipeline.schedule.timeline import Measured, Timeline
from core.pipeline.search.auto import Tuner, measured_costs


class Pipeline(AnsweredPipeline, NumberedSteps):
    """`step(batch, loss_fn)` runs forward, input gradients, weight gradients, recomputation and reduction.

    stages: the modules of this rank, in the order of their stages, or a mapping stage -> module; any
        `nn.Module`. A stage takes what the previous one returned (a tensor, a tuple positionally, a mapping by
        name); anything else that its forward takes by name comes from the microbatch.
    schedule: a name (`python -m core.pipeline.simulate --list`), a `Schedule`, a function
        (ranks, microbatches) -> Schedule, or "auto": two steps are measured (the first counts bytes, the second
        times), then the best schedule found for these costs is used; rank 0 prints it.
    memory_limit, search_seconds: of "auto", bytes of activations per rank (default: what the first schedule holds),
        and how long rank 0 may search while the others wait.
    recompute: "none", "selective", "layer" (see `apply_recompute`), "stage" (the whole stage, as an action of
        the schedule), or a list with one of these (or names and classes of modules) per stage of the model.
    recompute_keeps: "attention" or "nothing", see `apply_recompute`.
    grad_sync: collects and sums gradients; by default nobody sums them over replicas, and they stay in `.grad`.
    receive_ahead: receives posted beyond the one that is needed (default: 4 on CPUs, else 2).
    step_index: of the next step; set it to resume.

    Collective over the world. Raises ValueError, on every rank: a schedule that does not fit the stages, misses or
    repeats an action, never ends, or differs between ranks; a stage recomputed by R and inside as well; a `main_grad`
    without its owner.
    """

    schedule: Schedule
    _asked: ScheduleLike  # what it was made from
    _recomputed: list[int]  # stages that are recomputed as a whole

    def __init__(
        self,
        stages: Modules,
        *,
        ps: ParallelState,
        schedule: ScheduleLike = "1f1b",
        num_microbatches: int = 1,
        recompute: str | Sequence[Any] = "none",
        recompute_keeps: str = "attention",
        grad_sync: GradSync | None = None,
        seed: int = 0,
        memory_limit: float | None = None,
        search_seconds: float = 10.0,
        receive_ahead: int | None = None,
    ) -> None:
        self.ps = ps
        self._microbatches = num_microbatches
        self.seed = seed
        # prefetching gains more with gloo; on an accelerator a posted receive occupies part of the device
        default = 4 if ps.device.type == "cpu" else 2
        self.receive_ahead = default if receive_ahead is None else receive_ahead
        tuner = Tuner(ps, num_microbatches, memory_limit, self.receive_ahead, search_seconds)
        self._tuner = tuner if schedule == "auto" else None
        # so far: ranks compare it when one of them fails
        self._calls = 0
        self.grad_sync = grad_sync if grad_sync is not None else NullGradSync()
        self.stages: dict[int, Stage] = {}
        self._connections = Connections(ps, self.receive_ahead)
        # by their number of microbatches
        self._forward_schedules: dict[int, Schedule] = {}
        self._clock: Clock | None = None  # of the last step
        self._plain_loop: PlainLoopWatch | None = None
        self._batch_watch = BatchWatch(ps)
        self._position = ""  # the action under way when a call failed

        # every rank must reach both agreements, whatever goes wrong on it: otherwise the others would deadlock there
        agree(ps, describe_arguments(schedule, num_microbatches, recompute, recompute_keeps))
        problem: Exception | None = None
        try:
            self._build(
                stages, schedule, recompute, recompute_keeps, without_sync=grad_sync is None
            )
        except Exception as error:
            problem = error
        self._key = self._agree_on_schedule(problem)
        has_twins = check_tables(self.modules, ps, self.schedule.placement)
        modules = [*self.modules.values()]
        self._numbers = StepNumbers(modules, [stage.context for stage in self.stages.values()])
        self._loss_watch = LossWatch(ps, modules)
        self.sums_watch = SumsWatch(modules, ps, grad_sync)
        if ps.size("pp") > 1:
            watches = (self.sums_watch, grad_sync is None, has_twins, self.schedule.stages)
            self._plain_loop = PlainLoopWatch(ps, self.modules, *watches)
        # connect before a step can fail: a rank that waits for a connection cannot be told of another's failure
        self._connections.plan(self.schedule)

    @property
    def num_microbatches(self) -> int:
        """Of each step; the schedule and its messages are laid out for it. See `use_microbatches`."""
        return self._microbatches

    def use_microbatches(self, count: int) -> None:
        """Lay out the same schedule for another number of microbatches, for a batch that grows. Collective.

        Raises ValueError, on every rank: "auto" or a `Schedule`, which are for one number; one that it cannot have.
        """
        if count == self._microbatches:
            return
        problem: Exception | None = None
        try:
            if isinstance(self._asked, Schedule) or self._tuner is not None:
                raise ValueError(
                    f"this schedule was laid out for {self._microbatches} microbatches, {count} are asked for; give "
                    "one by name, or a function (ranks, microbatches) -> Schedule"
                )
            resolved = resolve_schedule(self._asked, self.modules, self.ps, count)
            schedule = add_recompute(resolved, self._recomputed)
            check(schedule, count)
        except Exception as error:
            problem = error
        self._key = agree(self.ps, [f"num_microbatches={count}"], problem)
        self.schedule, self._microbatches = schedule, count
        self._connections.plan(schedule)

    def _agree_on_schedule(self, problem: Exception | None) -> str:
        """A name of this pipeline; after a failure, on any rank, all raise and give the modules back."""
        resolved = [self.schedule.text()] if problem is None else []
        try:
            return agree(self.ps, resolved, problem)
        except Exception:
            self.close()
            raise

    def _build(
        self,
        stages: Modules,
        schedule: ScheduleLike,
        recompute: Any,
        keeps: str,
        *,
        without_sync: bool,
    ) -> None:
        """Schedule and stages. Raises ValueError, on this rank: see the class."""
        ps, modules = self.ps, list(modules_of(stages).values())
        self.schedule = resolve_schedule(schedule, stages, ps, self.num_microbatches)
        # schedule and policies first: they say which stages there are, and what each recomputes
        refuse_other_kinds(modules)

        # activation checkpointing of whole stages is part of the schedule: an R before each I
        policies = recompute_policies(recompute, self.schedule.stages)
        recomputed_stages = [stage for stage, policy in enumerate(policies) if policy == "stage"]
        self.schedule = add_recompute(self.schedule, recomputed_stages)
        self._asked, self._recomputed = schedule, recomputed_stages
        if self._tuner is not None:
            self._tuner.recomputed = recomputed_stages

        # a schedule of the user's own may be incomplete or deadlock: find out before anything runs
        check(self.schedule, self.num_microbatches)
        check_gathers(self.schedule)
        play(self.schedule)
        refuse_other_groups(modules, ps)
        if without_sync:
            refuse_main_grad(modules)

        count = self.schedule.stages
        for index, module in zip(self.schedule.stages_of(ps.index("pp")), modules, strict=True):
            policy = policies[index]
            refuse_nested_recompute(index, module, policy, self.schedule)
            how = {
                "policy": policy,
                "keeps": keeps,
                "seed": self.seed,
                "context_rank": ps.index("cp"),
            }
            self.stages[index] = Stage(module, index, count, device=ps.device, **how)

    @property
    def modules(self) -> dict[int, nn.Module]:
        """stage -> module of this rank."""
        return {index: stage.module for index, stage in self.stages.items()}

    def step(
        self, batch: Batch | None, loss_fn: LossFn, loss_scale: float | Tensor = 1.0
    ) -> StepResult:
        """Gradients of `loss_scale` x the global sum of `loss_fn`'s losses, added up by `grad_sync`.

        batch: this replica's tensors [b, ...], cut along dim 0 into microbatches, the same on all its pipeline
        ranks; None on a rank whose stages take nothing from it. loss_fn(output, microbatch) ->
        (loss_sum, num_tokens) is called on the rank of the last stage; nothing divides here. The result is global,
        on every rank (an all-reduce over pp and one over dp-cp, beside those of `grad_sync`).
        Raises PipelineError: any rank's failure, on every rank; it is a ValueError as well if that failure was one (a
        batch that does not divide, another shape within a step). A single process raises the failure itself.
        """
        with self._broadcast_failures("step"):
            loss_fn = self._loss_watch.around(loss_fn, self.num_microbatches)
            self._batch_watch.before_step(batch)
            self.sums_watch.before_step()
            how = {"training": True, "loss_scale": loss_scale, "draws": self._numbers.begin_step()}
            step = self._step_context(batch, self.num_microbatches, loss_fn, **how)
            # a gradient is final after one delivery per microbatch and stage that uses the parameter
            deliveries: dict[Any, int] = {}
            for stage in self.stages.values():
                stage.context.begin_step()
                for parameter in stage.parameters:
                    deliveries[parameter] = deliveries.get(parameter, 0) + self.num_microbatches
            self.grad_sync.begin_step(deliveries, split=True)
            tied_grads = {}
            if isinstance(self.grad_sync, NullGradSync):
                tied_grads = detach_tied_gradients(list(deliveries), self.schedule.placement)
            executor = self._executor(self.schedule, step, batch)
            clock = Clock(self.ps.device)
            self._run(executor, clock)
            self._loss_watch.after_step()
            # gradients over replicas, then over the two ends of a tied table, then the result over all ranks
            with named("sums"):
                self.grad_sync.finish()
                for stage in self.stages.values():
                    stage.context.end_step()
            sum_tied_gradients(tied_grads, self.ps)
            result = self._global_result(executor.total(self.ps.device), self._plain_loop)
            self.sums_watch.after_step(result, loss_scale)
            clock.stop()
            self._batch_watch.after_step()
            if self._plain_loop is not None:
                self._plain_loop.after_step()
        # outside of the block: "auto" has errors of its own, which it raises on every rank
        self._clock = clock
        self._numbers.end_step()
        self._tune()
        return result

    def evaluate(self, batch: Batch | None, loss_fn: LossFn) -> StepResult:
        """The global sums without gradients, in eval mode; any number of rows."""
        with self._broadcast_failures("evaluate"):
            executor = self._run_forward(batch, loss_fn)
            if self._plain_loop is not None:
                self._plain_loop.after_evaluation()
            return self._global_result(executor.total(self.ps.device))

    def forward(self, batch: Batch | None, *, microbatches: int | None = None) -> Any:
        """The outputs in eval mode without gradients, joined along dim 0; None on ranks without the last stage.

        microbatches: into how many the batch is cut, the same on all pipeline ranks, which then need not tell each
        other how many rows they have: nothing is sent but activations, as generated tokens want it.
        """
        self._numbers.tell_of_statistics()
        with self._broadcast_failures("forward"):
            outputs = self._run_forward(batch, None, microbatches).outputs
        return join_outputs([outputs[key] for key in sorted(outputs)]) if outputs else None

    def from_last_stage(self, value: Tensor) -> Tensor:
        """`value` of the rank of the last stage, in place on all pipeline ranks. Broadcast over pp."""
        return broadcast(value, self.ps.group("pp"), self.schedule.placement[-1])

    def timeline(self) -> Timeline:
        """When each pipeline rank did what in the last step, in seconds since its start. All-gather over pp."""
        return Timeline.of(all_gather_objects(self._measured(), self.ps.group("pp")))

    def predicted(self, timeline: Timeline) -> Played:
        """What the simulator says of this schedule with the times of a measured step: the medians per stage."""
        memory = dict.fromkeys(range(self.schedule.stages), StageMemory())
        return play(self.schedule, measured_costs(self.schedule, timeline, memory))

    def close(self) -> None:
        """Give the modules their own forwards back."""
        for stage in self.stages.values():
            stage.close()
        if self._plain_loop is not None:
            self._plain_loop.before_call()

    def _run_forward(
        self, batch: Batch | None, loss_fn: LossFn | None, microbatches: int | None = None
    ) -> Executor:
        """All microbatches, forward only."""
        count = microbatches
        if count is None:
            count = microbatches_of_all(batch, self.ps.group("pp"), self.num_microbatches)
        step = self._step_context(batch, count, loss_fn, forward=self._numbers.begin_forward(batch))
        # the same object for the same count: its plan is looked up, not made again
        schedule = self._forward_schedules.get(count)
        if schedule is None:
            schedule = forward_only(self.schedule.placement, self.schedule.ranks, count)
            self._forward_schedules[count] = schedule
        executor = self._executor(schedule, step, batch)
        with ExitStack() as stack:
            for stage in self.stages.values():
                stack.enter_context(evaluating(stage.module))
            if self._plain_loop is not None:
                stack.callback(self._plain_loop.after_forward)
            self._run(executor, Clock(self.ps.device))
        return executor

    def _step_context(
        self, batch: Batch | None, count: int, loss_fn: LossFn | None, **options: Any
    ) -> StepContext:
        microbatches: list[Any] = (
            [None] * count if batch is None else split_microbatches(batch, count)
        )
        # replicas number their microbatches one after the other: random numbers depend on the global index
        first_microbatch = self.ps.index("dp") * count
        return StepContext(
            self.step_index, first_microbatch, microbatches, loss_fn, self.grad_sync, **options
        )

    def _tune(self) -> None:
        """After the first steps of "auto": measured costs, and the schedule that they lead to."""
        if self._tuner is None or self._tuner.done:
            return
        better = self._tuner.after_step(self.schedule, self._measured())
        if better is not None:
            self.schedule = better
            self._connections.forget()
            self._forward_schedules.clear()
            self._connections.plan(better)

    def _measured(self) -> Measured:
        """This rank's rows of the timeline; waits for the device, which a step does not."""
        return Measured() if self._clock is None else self._clock.measured()

    def _broadcast_failures(self, call: str) -> FailureBroadcast:
        """Around all that can fail on one rank while others wait for it, the cutting of its batch included."""
        if self._plain_loop is not None:
            self._plain_loop.before_call(self.num_microbatches if call == "step" else 0)
        self._calls += 1
        self._position = "before its first action"
        return FailureBroadcast(
            self.ps, self._key, f"{call} (call {self._calls})", lambda: self._position
        )

    def _executor(self, schedule: Schedule, step: StepContext, batch: Batch | None) -> Executor:
        rank_plan = self._connections.plan(schedule)
        channel = self._connections.channel(schedule, rows_of(batch))
        watch = self._tuner.watch if self._tuner is not None and step.training else None
        return Executor(rank_plan, self.stages, channel, step, watch)

    def _run(self, executor: Executor, clock: Clock) -> None:
        for stage in self.stages.values():
            stage.prepare()
        try:
            # stages seed torch's generators for every microbatch
            with kept_generators(self.ps.device):
                executor.run(clock)
        finally:
            self._position = executor.position
            for stage in self.stages.values():
                stage.clear()

    def _global_result(self, total: Tensor, watch: PlainLoopWatch | None = None) -> StepResult:
        updates = None if watch is None else watch.updates
        # only the last stage has numbers, the others add zeros; then the sum over replicas
        if updates is not None:
            total = updates.with_numbers(total)
        total = all_reduce(all_reduce(total, self.ps.group("pp")), self.ps.group("dp-cp"))
        if updates is not None:
            updates.look(total[2:])
        return StepResult(total[0], total[1])
