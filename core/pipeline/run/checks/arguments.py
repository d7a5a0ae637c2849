"""The arguments of a `Pipeline`: which schedule, which placement, which recomputation; refused where they clash."""

import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from core.autograd import has_main_grad, has_regions
from core.field_names import AnswersArguments
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.modules import Modules, modules_of
from core.parallel_state.state import ParallelState
from core.pipeline.schedule.actions import Schedule, check_placement
from core.pipeline.schedule.schedules import NAMED, auto_placement, make
from core.pipeline.search.auto import first_schedule

ScheduleLike = str | Schedule | Callable[[int, int], Schedule]
POLICIES = ("none", "selective", "layer", "stage")


# of torch.distributed.pipelining, DeepSpeed's and Megatron's -> what there is
_THEIRS = {
    "n_microbatches": "give num_microbatches",
    "micro_batches": "give num_microbatches",
    "loss_fn": "give it to step(batch, loss_fn), (output, batch) -> (sum, number) or a mean",
    "num_stages": "give the layers of one stage each: core.pipeline.partition divides them",
    "partition_method": "give the layers of one stage each: core.pipeline.partition divides them",
    "stage_index": "stages is a mapping stage -> module, or this rank's modules in order",
    "activation_checkpoint_interval": "give recompute='layer'",
    "scale_grads": "leave it out: gradients are of the batch's mean",
    "device": "leave it out: ps.device",
    "group": "leave it out: ps has the groups",
}


class AnsweredPipeline(AnswersArguments):
    """What is said of arguments before a pipeline is built of them."""

    _their_arguments = _THEIRS

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        schedule = kwargs.get("schedule", "1f1b")
        if kwargs.get("memory_limit") is not None and schedule != "auto":
            name = repr(schedule) if isinstance(schedule, str) else "the given schedule"
            warnings.warn(
                f"memory_limit={kwargs['memory_limit']:g} has no effect: only schedule='auto' searches below one, "
                f"and {name} holds what it holds; give schedule='auto', or recompute='layer' to hold less",
                stacklevel=2,
            )
        return super().__new__(cls, *args, **kwargs)


def agree(ps: ParallelState, arguments: list[str], problem: Exception | None = None) -> str:
    """Raise on every rank what one rank found wrong, or that ranks differ. All-gather over the world.

    Returns a name of this pipeline that all ranks share.
    """
    text = ""
    if problem is not None:
        text = f"{type(problem).__name__}: {problem}"
    per_rank = all_gather_objects((arguments, text, uuid.uuid4().hex), ps.world)
    # only now: the other ranks wait in the gather, and learn of it there
    if problem is not None:
        raise problem
    expected, _, shared_name = per_rank[0]
    for rank, (rank_arguments, rank_problem, _) in enumerate(per_rank):
        if rank_problem:
            raise ValueError(f"rank {rank} cannot build its part of the pipeline: {rank_problem}")
        if rank_arguments != expected:
            pairs = zip(expected, rank_arguments, strict=True)
            first, other = next((a, b) for a, b in pairs if a != b)
            raise ValueError(
                f"ranks 0 and {rank} were given different schedules:\nrank 0: {first}\nrank {rank}: {other}\n"
                "give every rank the same schedule, num_microbatches and recompute"
            )
    return shared_name


def describe_arguments(
    schedule: ScheduleLike, microbatches: int, recompute: str | Sequence[Any], keeps: str
) -> list[str]:
    """What the user asked for, to be compared between ranks; a function's schedule is compared once it is made."""
    if isinstance(schedule, Schedule):
        schedule_text = schedule.text()
    else:
        schedule_text = "a function"
        if isinstance(schedule, str):
            schedule_text = schedule
    asked = [
        f"schedule {schedule_text}",
        f"num_microbatches={microbatches}",
        f"recompute={recompute!r}",
    ]
    return [*asked, f"recompute_keeps={keeps!r}"]


def resolve_schedule(
    schedule: ScheduleLike, stages: Modules, ps: ParallelState, microbatches: int
) -> Schedule:
    """The schedule for the stages of this rank.

    All-gather over pp for "auto". Raises ValueError where schedule and stages do not fit together.
    """
    if not hasattr(microbatches, "__index__") or microbatches < 1:
        raise ValueError(f"num_microbatches={microbatches!r} must be at least 1, a whole number")
    modules = modules_of(stages)
    if isinstance(schedule, Schedule):
        resolved = schedule
        check_placement(resolved.placement, resolved.ranks)
    elif schedule == "auto":
        resolved = first_schedule(_gather_placement(stages, ps), microbatches)
    else:
        # interleaved schedules take as many stages per rank as there are modules
        chunks = None
        if isinstance(schedule, str) and schedule in NAMED and NAMED[schedule].any_chunks:
            chunks = len(modules)
        resolved = make(schedule, ps.size("pp"), microbatches, chunks)

    # what this rank was given must be what the schedule places here
    local_stages = resolved.stages_of(ps.index("pp"))
    if isinstance(stages, Mapping):
        given_stages = tuple(modules)
    else:
        given_stages = local_stages
    if (
        resolved.ranks != ps.size("pp")
        or len(modules) != len(local_stages)
        or given_stages != local_stages
    ):
        numbers = ""
        if given_stages != local_stages:
            numbers = f" for stages {given_stages}"
        raise ValueError(
            f"schedule {resolved.name!r} places {resolved.stages} stages on {resolved.ranks} ranks as "
            f"{resolved.placement}: pipeline rank {ps.index('pp')} of {ps.size('pp')} holds stages {local_stages}, "
            f"and was given {len(modules)} modules{numbers}; build the stages of this placement (a named one's is "
            f"schedules.placement({resolved.name!r}, {ps.size('pp')})), or take a schedule with as many"
        )
    return resolved


def _gather_placement(stages: Modules, ps: ParallelState) -> tuple[int, ...]:
    """Stage -> pipeline rank, from the mappings of all ranks; for lists a V for two stages each, else a loop.

    All-gather over pp. Raises ValueError: stages that are missing, or stand on two ranks.
    """
    local_stages = sorted(stages) if isinstance(stages, Mapping) else None
    per_rank = all_gather_objects((local_stages, len(modules_of(stages))), ps.group("pp"))
    if any(rank_stages is None for rank_stages, _ in per_rank):
        return auto_placement(len(per_rank), len(modules_of(stages)))
    # mappings name their stages: together they are the placement
    owner = {}
    for rank, (rank_stages, _) in enumerate(per_rank):
        owner.update(dict.fromkeys(rank_stages, rank))
    count = sum(module_count for _, module_count in per_rank)
    if sorted(owner) != list(range(count)):
        raise ValueError(
            f"the ranks hold stages {[rank_stages for rank_stages, _ in per_rank]}: together they must be 0 to "
            f"{count - 1}, each once"
        )
    placement = tuple(owner[stage] for stage in range(count))
    check_placement(placement, len(per_rank))
    return placement


def recompute_policies(recompute: str | Sequence[Any], stages: int) -> list[Any]:
    """One policy per stage of the model. Raises ValueError: another number of them, or an unknown name."""
    if isinstance(recompute, str):
        policies: list[Any] = [recompute] * stages
    else:
        policies = list(recompute)
    if len(policies) != stages:
        raise ValueError(
            f"recompute has {len(policies)} policies for {stages} stages; give one for each stage of the model "
            "(names of modules as a list of their own), or one string for all"
        )
    for policy in policies:
        if isinstance(policy, str) and policy not in POLICIES:
            hint = ""
            if policy == "full":
                hint = "; Megatron's 'full' is 'layer' here"
            raise ValueError(
                f"recompute={policy!r} is none of the {len(POLICIES)} policies {', '.join(POLICIES)}, nor a list of "
                f"names or classes of modules{hint}"
            )
    return policies


def refuse_nested_recompute(stage: int, module: nn.Module, policy: Any, schedule: Schedule) -> None:
    """Raise ValueError for a stage that R runs again and that has recomputed regions inside: they would run again
    within R's forward and once more in its backward."""
    recomputes_regions = policy not in ("none", "stage")
    recomputes_stage = policy == "stage" or any(index == stage for index, _ in schedule.recomputed)
    if recomputes_stage and (recomputes_regions or has_regions(module)):
        cause = "apply_recompute"
        if recomputes_regions:
            cause = f"recompute={policy!r}"
        raise ValueError(
            f"stage {stage} is recomputed as a whole (an R of schedule {schedule.name!r}, or recompute='stage') and "
            f"in regions inside ({cause}), which would run 3 times; use one of the two"
        )


def refuse_main_grad(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError for gradient buffers that nobody would reduce."""
    for module in modules:
        if any(has_main_grad(parameter) for parameter in module.parameters()):
            raise ValueError(
                "the model's parameters have a main_grad but grad_sync is None: nobody would sum their gradients "
                "over the replicas; pass the grad_sync that made them"
            )


def refuse_other_kinds(modules: Sequence[Any]) -> None:
    """Raise ValueError: a stage that is no `nn.Module`."""
    others = [type(module).__name__ for module in modules if not isinstance(module, nn.Module)]
    if others:
        raise ValueError(
            f"{len(others)} of {len(modules)} stages are no nn.Module but a {others[0]}; wrap it in one"
        )
