"""A model in stages over the pipeline ranks, trained one step at a time under any schedule."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import gcd
from typing import Any

from torch import Tensor, nn

from core.autograd import GradSync, NullGradSync, has_regions
from core.parallel_state.collectives import all_gather_objects, all_reduce, broadcast
from core.parallel_state.modules import Modules, modules_of
from core.parallel_state.random import generators_of
from core.parallel_state.state import ParallelState
from core.pipeline.run.channel import Channel
from core.pipeline.run.executor import Clock, Executor
from core.pipeline.run.failure import ToldToAll
from core.pipeline.run.microbatch import StepContext
from core.pipeline.run.plain_loop import BatchWatch, LossWatch, ScaleWatch, refuse_other_groups
from core.pipeline.run.stage import Stage
from core.pipeline.run.step import Batch, LossFn, StepResult, evaluating, join_outputs, rows_of, split_microbatches
from core.pipeline.run.tied import check_tables, set_apart, sum_apart
from core.pipeline.schedule.actions import Schedule, check_placement
from core.pipeline.schedule.lower import RankPlan, plan
from core.pipeline.schedule.memory import StageMemory
from core.pipeline.schedule.passes import add_recompute, forward_only
from core.pipeline.schedule.player import Played, check, check_gathers, play
from core.pipeline.schedule.schedules import NAMED, auto_placement, make
from core.pipeline.schedule.timeline import Measured, Timeline
from core.pipeline.search.auto import Tuner, first_schedule, measured_costs

ScheduleLike = str | Schedule | Callable[[int, int], Schedule]


class Pipeline:
    """`step(batch, loss_fn)` runs forward, input gradients, weight gradients, recomputation and reduction.

    stages: the modules of this rank, in the order of their stages, or a mapping stage -> module; any
        `nn.Module`. A stage takes what the one before returned (a tensor, a tuple positionally, a mapping by
        name); whatever else its forward takes by name comes from the microbatch.
    schedule: a name (`python -m core.pipeline.simulate --list`), a `Schedule`, a function
        (ranks, microbatches) -> Schedule, or "auto": two steps are measured (the first counts bytes, the second
        times), then the best schedule found for these costs is used, and said on rank 0.
    memory_limit, search_seconds: of "auto", bytes of activations per rank (default: what the first schedule holds),
        and how long rank 0 may search while the others wait.
    recompute: "none", "selective", "layer" (see `apply_recompute`), "stage" (the whole stage, as an action of
        the schedule), or a list with one of these (or names and classes of modules) per stage of the model.
    grad_sync: collects and sums gradients; by default nobody sums them over replicas, and they stay in `.grad`.
    receive_ahead: receives posted beyond the one that is needed (default: 4 on CPUs, else 2).
    step_index: of the next step; set it to resume.

    Collective over the world. Raises ValueError, on every rank: a schedule that does not fit the stages, misses or
    repeats an action, never ends, or differs between ranks; a stage recomputed by R and inside as well; a `main_grad`
    without its owner.
    """

    def __init__(
        self,
        stages: Modules,
        *,
        ps: ParallelState,
        schedule: ScheduleLike = "1f1b",
        num_microbatches: int = 1,
        recompute: str | Sequence[Any] = "none",
        grad_sync: GradSync | None = None,
        seed: int = 0,
        memory_limit: float | None = None,
        search_seconds: float = 10.0,
        receive_ahead: int | None = None,
    ) -> None:
        self.ps, self._microbatches, self.seed = ps, num_microbatches, seed
        # gloo gains by more; on an accelerator a posted receive occupies it
        default = 4 if ps.device.type == "cpu" else 2
        self.receive_ahead = default if receive_ahead is None else receive_ahead
        auto = Tuner(ps, num_microbatches, memory_limit, self.receive_ahead, search_seconds)
        self._tuner = auto if schedule == "auto" else None
        self.step_index, self._calls = 0, 0
        self._ranks = ps.grid.members(ps.rank, "pp")
        self.grad_sync = grad_sync if grad_sync is not None else NullGradSync()
        self.stages: dict[int, Stage] = {}
        self._plans: dict[Schedule, RankPlan] = {}
        self._clock: Clock | None = None  # of the last step
        self._scales = ScaleWatch(ps) if ps.size("pp") > 1 and grad_sync is None else None
        self._batches = BatchWatch(ps)
        self._where = ""  # what was under way when a call failed
        self._agree(_given(schedule, num_microbatches, recompute))
        problem: Exception | None = None
        resolved: list[str] = []
        try:
            self._build(stages, schedule, recompute, alone=grad_sync is None)
            resolved = [self.schedule.text()]
        except Exception as error:
            problem = error
        try:
            self._key = self._agree(resolved, problem)
        except Exception:
            self.close()
            raise
        check_tables(self.modules, ps)
        self._losses = LossWatch(ps, [*self.modules.values()])
        self._connect(self.schedule)  # before anything can fail: others would wait for a connection, not in one

    @property
    def num_microbatches(self) -> int:
        """Of each step; the schedule and its messages are laid out for it: another number is another Pipeline."""
        return self._microbatches

    def _build(
        self,
        stages: Modules,
        schedule: ScheduleLike,
        recompute: str | Sequence[Any],
        *,
        alone: bool,
    ) -> None:
        """Schedule and stages. Raises ValueError, on this rank: see the class."""
        ps, modules = self.ps, list(modules_of(stages).values())
        self.schedule = _resolve(schedule, stages, ps, self.num_microbatches)
        if strange := [type(m).__name__ for m in modules if not isinstance(m, nn.Module)]:
            raise ValueError(
                f"{len(strange)} of {len(modules)} stages are no nn.Module but a {strange[0]}; wrap it in one"
            )
        policies = _policies(recompute, self.schedule.stages)
        for policy in policies:
            _check_policy(policy)
        again = [s for s, policy in enumerate(policies) if policy == "stage"]
        self.schedule = add_recompute(self.schedule, again)
        if self._tuner is not None:
            self._tuner.recomputed = again
        check(self.schedule, self.num_microbatches)
        check_gathers(self.schedule)
        play(self.schedule)  # ends, or says who waits for whom
        refuse_other_groups(modules, ps)
        if alone:
            _refuse_main_grad(modules)
        count = self.schedule.stages
        for s, module in zip(self.schedule.stages_of(ps.index("pp")), modules, strict=True):
            _refuse_twice(s, module, policies[s], self.schedule)
            self.stages[s] = Stage(module, s, count, policy=policies[s], seed=self.seed, device=ps.device)

    @property
    def modules(self) -> dict[int, nn.Module]:
        """stage -> module of this rank."""
        return {s: stage.module for s, stage in self.stages.items()}

    def step(self, batch: Batch | None, loss_fn: LossFn, loss_scale: float | Tensor = 1.0) -> StepResult:
        """Gradients of `loss_scale` x the global sum of `loss_fn`'s losses, added up by `grad_sync`.

        batch: this replica's tensors [b, ...], cut along dim 0 into microbatches, the same on all its pipeline
        ranks; None on a rank whose stages take nothing from it. loss_fn(output, microbatch) ->
        (loss_sum, num_tokens) is called on the rank of the last stage; nothing divides here. The result is global,
        on every rank (an all-reduce over pp and one over dp-cp, beside those of `grad_sync`).
        Raises PipelineError: any rank's failure, on every rank; it is a ValueError as well if that failure was one (a
        batch that does not divide, another shape within a step). A single process raises the failure itself.
        """
        with self._told_to_all("step"):
            loss_fn = self._losses.around(loss_fn)
            self._batches.before_step(batch)
            facts = self._facts(batch, self.num_microbatches, loss_fn, training=True, loss_scale=loss_scale)
            counts: dict[Any, int] = {}
            for stage in self.stages.values():
                for parameter in stage.parameters:
                    counts[parameter] = counts.get(parameter, 0) + self.num_microbatches
            alone = isinstance(self.grad_sync, NullGradSync)
            self.grad_sync.begin_step(counts, split=True)
            tied = set_apart(list(counts), self.schedule.placement) if alone else {}
            executor = self._executor(self.schedule, facts, batch)
            clock = Clock(self.ps.device)
            self._run(executor, clock)
            self.grad_sync.finish()
            sum_apart(tied, self.ps)
            result = self._result(executor.total(self.ps.device))
            clock.stop()
            self._batches.after_step()
            if alone and self._scales is not None:
                self._scales.after_step([*self.modules.values()])
        self._clock = clock
        self.step_index += 1
        self._tune()
        return result

    def evaluate(self, batch: Batch | None, loss_fn: LossFn) -> StepResult:
        """The global sums without gradients, in eval mode; any number of rows."""
        with self._told_to_all("evaluate"):
            return self._result(self._forward(batch, loss_fn).total(self.ps.device))

    def forward(self, batch: Batch | None) -> Any:
        """The outputs in eval mode without gradients, joined along dim 0; None on ranks without the last stage."""
        with self._told_to_all("forward"):
            outputs = self._forward(batch, None).outputs
        return join_outputs([outputs[m] for m in sorted(outputs)]) if outputs else None

    def from_last_stage(self, value: Tensor) -> Tensor:
        """`value` of the rank of the last stage, in place on all pipeline ranks. Broadcast over pp."""
        return broadcast(value, self.ps.group("pp"), self.schedule.placement[-1])

    def timeline(self) -> Timeline:
        """When each pipeline rank did what in the last step, in seconds since its start. All-gather over pp."""
        return Timeline.of(all_gather_objects(self._measured(), self.ps.group("pp")))

    def predicted(self, timeline: Timeline) -> Played:
        """What the player says of this schedule with the times of a measured step: the medians per stage."""
        memory = dict.fromkeys(range(self.schedule.stages), StageMemory())
        return play(self.schedule, measured_costs(self.schedule, timeline, memory))

    def close(self) -> None:
        """Give the modules their own forwards back."""
        for stage in self.stages.values():
            stage.close()

    def _forward(self, batch: Batch | None, loss_fn: LossFn | None) -> Executor:
        sizes = all_gather_objects(rows_of(batch), self.ps.group("pp"))  # ranks without a batch follow the others
        known = {n for n in sizes if n is not None} or {self.num_microbatches}
        if len(known) > 1:
            raise ValueError(f"the pipeline ranks' batches have {sizes} rows; give all the same, or None")
        count = gcd(*known, self.num_microbatches)
        facts = self._facts(batch, count, loss_fn)
        executor = self._executor(forward_only(self.schedule.placement, self.schedule.ranks, count), facts, batch)
        with ExitStack() as stack:
            for stage in self.stages.values():
                stack.enter_context(evaluating(stage.module))
            self._run(executor, Clock(self.ps.device))
        return executor

    def _facts(self, batch: Batch | None, count: int, loss_fn: LossFn | None, **more: Any) -> StepContext:
        parts = split_microbatches(batch, count) if batch is not None else [None] * count
        first = self.ps.index("dp") * count
        return StepContext(self.step_index, first, parts, loss_fn, self.grad_sync, **more)

    def _tune(self) -> None:
        """After the first steps of "auto": measured costs, and the schedule that they lead to."""
        if self._tuner is None or self._tuner.done:
            return
        better = self._tuner.after_step(self.schedule, self._measured())
        if better is not None:
            self.schedule = better
            self._plans.clear()
            self._connect(better)

    def _measured(self) -> Measured:
        """This rank's part of the timeline; the device is waited for here and not in every step."""
        return self._clock.measured() if self._clock is not None else Measured()

    def _told_to_all(self, call: str) -> ToldToAll:
        """Around all that can fail on one rank while others wait for it, the cutting of its batch included."""
        if self._scales is not None:
            self._scales.before_call()
        self._calls += 1
        self._where = "before its first action"
        return ToldToAll(self.ps, self._key, f"{call} (call {self._calls})", lambda: self._where)

    def _connect(self, schedule: Schedule) -> RankPlan:
        """This rank's plan; connected to all whom it talks to. Collective over pp where the schedule is new."""
        if schedule not in self._plans:
            self._plans[schedule] = plan(schedule, self.ps.index("pp"))
            self.ps.connect((self._rank(a), self._rank(b)) for a, b in self._plans[schedule].links)
        return self._plans[schedule]

    def _rank(self, index: int) -> int:
        """The global rank of a pipeline rank; of this one for -1."""
        return self.ps.rank if index == -1 else self._ranks[index]

    def _executor(self, schedule: Schedule, facts: StepContext, batch: Batch | None) -> Executor:
        todo = self._connect(schedule)
        made = self.ps.connect((self._rank(a), self._rank(b)) for a, b in todo.links)
        groups = {(a, b): made[self._rank(a), self._rank(b)] for a, b in todo.links}
        channel = Channel(todo, groups, self._rank, self.ps.device, self.receive_ahead, rows_of(batch))
        watch = self._tuner.watch if self._tuner is not None and facts.training else None
        return Executor(todo, self.stages, channel, facts, watch)

    def _run(self, executor: Executor, clock: Clock) -> None:
        for stage in self.stages.values():
            stage.prepare()
        # stages seed them; the user's states are put back
        states = [(generator, generator.get_state()) for generator in generators_of(self.ps.device)]
        try:
            executor.run(clock)
        except BaseException:
            executor.channel.drop()
            raise
        finally:
            for generator, state in states:
                generator.set_state(state)
            self._where = executor.position
            for stage in self.stages.values():
                stage.clear()

    def _result(self, total: Tensor) -> StepResult:
        total = all_reduce(all_reduce(total, self.ps.group("pp")), self.ps.group("dp-cp"))
        return StepResult(total[0], total[1])

    def _agree(self, facts: list[str], problem: Exception | None = None) -> str:
        """Raise on every rank what one rank found, or that ranks differ; a name that all share for this pipeline."""
        told = f"{type(problem).__name__}: {problem}" if problem is not None else ""
        everyone = all_gather_objects((facts, told, uuid.uuid4().hex), self.ps.world)
        if problem is not None:
            raise problem
        for rank, (theirs, told, _) in enumerate(everyone):
            if told:
                raise ValueError(f"rank {rank} cannot build its part of the pipeline: {told}")
            if theirs != everyone[0][0]:
                ours, other = next((a, b) for a, b in zip(everyone[0][0], theirs, strict=True) if a != b)
                raise ValueError(
                    f"ranks 0 and {rank} were given different schedules:\nrank 0: {ours}\nrank {rank}: {other}\n"
                    "give every rank the same schedule, num_microbatches and recompute"
                )
        return everyone[0][2]


def _given(schedule: ScheduleLike, microbatches: int, recompute: str | Sequence[Any]) -> list[str]:
    """What the user asked for, to be compared between ranks; what a function makes is compared when it is made."""
    asked = schedule if isinstance(schedule, str) else "a function"
    text = schedule.text() if isinstance(schedule, Schedule) else asked
    return [f"schedule {text}", f"num_microbatches={microbatches}", f"recompute={recompute!r}"]


def _refuse_twice(stage: int, module: nn.Module, policy: Any, schedule: Schedule) -> None:
    """R runs the whole stage again: regions inside it would run a third time."""
    inside = policy not in ("none", "stage")
    whole = policy == "stage" or any(s == stage for s, _ in schedule.recomputed)
    if whole and (inside or has_regions(module)):
        by = f"recompute={policy!r}" if inside else "apply_recompute"
        raise ValueError(
            f"stage {stage} is recomputed as a whole (an R of schedule {schedule.name!r}, or recompute='stage') and "
            f"in regions inside ({by}), which would run 3 times; use one of the two"
        )


def _refuse_main_grad(modules: Sequence[nn.Module]) -> None:
    if any(getattr(p, "main_grad", None) is not None for module in modules for p in module.parameters()):
        raise ValueError(
            "the model's parameters have a main_grad but grad_sync is None: nobody would sum their gradients "
            "over the replicas; pass the grad_sync that made them"
        )


def _resolve(schedule: ScheduleLike, stages: Modules, ps: ParallelState, microbatches: int) -> Schedule:
    """The schedule for the stages at hand. Raises ValueError where they do not fit together."""
    if not hasattr(microbatches, "__index__") or microbatches < 1:
        raise ValueError(f"num_microbatches={microbatches!r} must be at least 1, a whole number")
    modules = modules_of(stages)
    if isinstance(schedule, Schedule):
        found = schedule
        check_placement(found.placement, found.ranks)
    elif schedule == "auto":
        found = first_schedule(_placement(stages, ps), microbatches)
    else:
        free = isinstance(schedule, str) and schedule in NAMED and NAMED[schedule].any_chunks
        found = make(schedule, ps.size("pp"), microbatches, len(modules) if free else None)
    mine = found.stages_of(ps.index("pp"))
    numbers = tuple(modules) if isinstance(stages, Mapping) else mine
    if found.ranks != ps.size("pp") or len(modules) != len(mine) or numbers != mine:
        raise ValueError(
            f"schedule {found.name!r} places {found.stages} stages on {found.ranks} ranks as {found.placement}: "
            f"pipeline rank {ps.index('pp')} of {ps.size('pp')} holds stages {mine}, and was given {len(modules)} "
            f"modules{f' for stages {numbers}' if numbers != mine else ''}; build the stages of this placement (a "
            f"named one's is schedules.placement({found.name!r}, {ps.size('pp')})), or take a schedule with as many"
        )
    return found


def _placement(stages: Modules, ps: ParallelState) -> tuple[int, ...]:
    """Where the stages are, as the mappings of all ranks say; of lists, a V for two each, else in a loop."""
    mine = sorted(stages) if isinstance(stages, Mapping) else None
    everyone = all_gather_objects((mine, len(modules_of(stages))), ps.group("pp"))
    if any(numbers is None for numbers, _ in everyone):
        return auto_placement(len(everyone), len(modules_of(stages)))
    owner = {s: rank for rank, (numbers, _) in enumerate(everyone) for s in numbers}
    count = sum(each for _, each in everyone)
    if sorted(owner) != list(range(count)):
        raise ValueError(
            f"the ranks hold stages {[numbers for numbers, _ in everyone]}: together they must be 0 to {count - 1}, "
            "each once"
        )
    placement = tuple(owner[s] for s in range(count))
    check_placement(placement, len(everyone))
    return placement


def _policies(recompute: str | Sequence[Any], stages: int) -> list[Any]:
    """One policy per stage."""
    if isinstance(recompute, str):
        return [recompute] * stages
    if len(recompute) != stages:
        raise ValueError(
            f"recompute has {len(recompute)} policies for {stages} stages; give one for each stage of the model "
            "(names of modules as a list of their own), or one string for all"
        )
    return list(recompute)


def _check_policy(policy: Any) -> None:
    known = ("none", "selective", "layer", "stage")
    if isinstance(policy, str) and policy not in known:
        hint = "; Megatron's 'full' is 'layer' here" if policy == "full" else ""
        raise ValueError(
            f"recompute={policy!r} is none of the {len(known)} policies {', '.join(known)}, nor a list of names or "
            f"classes of modules{hint}"
        )
