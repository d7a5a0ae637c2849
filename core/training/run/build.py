"""From the stages of this rank to their optimizer and executor."""

from collections.abc import Mapping

from torch import nn

from core.autograd import GradSync, apply_recompute, offload_activations
from core.autograd.compiled import check_compiler, compile_layers
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel
from core.models.huggingface.parameter_names import told_of
from core.optimizer import OptimizerConfig, ShardedOptimizer, build_optimizer
from core.optimizer.by_name import is_frozen, patterns_of, unmatched
from core.parallel_state import ParallelState, layout_of
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.modules import named_parameters
from core.pipeline import Pipeline, SingleStage
from core.training.config import DataParallelConfig, PipelineConfig, TrainingConfig
from core.training.log.memory import MemoryReport


def build_sharded(
    stages: Mapping[int, nn.Module],
    data_parallel: DataParallelConfig,
    optimizer: OptimizerConfig,
    ps: ParallelState,
    memory: MemoryReport | None = None,
) -> tuple[DataParallel, ShardedOptimizer]:
    """Data parallelism (ZeRO stages) over the stages, and the optimizer over it. Collective.

    memory: reports what both hold. Raises ValueError: patterns of names that match nothing; see `freeze`.
    """
    # collectives inside: every rank reports memory, or none does
    if memory is not None:
        memory.at("model init")
    # before buckets are made: frozen parameters are in none
    freeze(stages, optimizer, ps)
    shard = DataParallel(stages, ps, **data_parallel.arguments())
    offload = data_parallel.offload_policy()
    sharded_optimizer = build_optimizer(shard, optimizer, offload=offload)
    if memory is not None:
        memory.holds(shard, sharded_optimizer)
        memory.at("optimizer init")
        memory.predict(offload)
    return shard, sharded_optimizer


def freeze(stages: Mapping[int, nn.Module], optimizer: OptimizerConfig, ps: ParallelState) -> None:
    """Parameters whose names match `optimizer.freeze` are not trained; before `DataParallel`. All-gather over pp.

    Raises ValueError, on every rank: a pattern, of rates and decays too, that matches nothing of the whole model;
    nothing left to train.
    """
    if not patterns_of(optimizer):
        return
    local = dict(named_parameters(stages))
    # a dict: each once, in the order of the stages
    all_names: dict[str, None] = {}
    for stage_names in all_gather_objects(list(local), ps.group("pp")):
        all_names |= dict.fromkeys(stage_names)
    problems = [f"optimizer.{message}" for message in unmatched(optimizer, all_names, told_of)]
    frozen = [name for name in all_names if is_frozen(optimizer, name)]
    if len(frozen) == len(all_names):
        problems.append(
            f"optimizer.freeze leaves none of {len(all_names)} parameters to train; leave some out of it"
        )
    if problems:
        raise ValueError("; ".join(problems))
    for name in frozen:
        if name in local:
            local[name].requires_grad_(False)


def build_executor(
    stages: Mapping[int, nn.Module],
    pipeline: PipelineConfig,
    training: TrainingConfig,
    ps: ParallelState,
    grad_sync: GradSync,
) -> SingleStage | Pipeline:
    """A `Pipeline` over several ranks, a `SingleStage` on one, with activation checkpointing and compilation as set.

    Collective. Raises ValueError: `compile` without a compiler, or of a model without layers.
    """
    for stage in stages.values():
        if isinstance(stage, GPTModel) and training.loss_chunk is not None:
            stage.loss_chunk = training.loss_chunk
    rows_per_replica = training.global_batch_size // ps.size("dp")
    num_microbatches = rows_per_replica // training.micro_batch_size
    if training.compile == "layer":
        check_compiler(ps.device)
        for stage in stages.values():
            compile_layers(stage, may_break=training.compile_fallback or None)
    # activation checkpointing is installed on the model here; a Pipeline does it stage by stage
    if ps.size("pp") == 1:
        (model,) = stages.values()
        context = getattr(model, "stage", None)
        keeps = training.recompute_keeps
        apply_recompute(model, training.recompute, stage=context, keeps=keeps)
        offload_activations(model, training.offload_activations)
        return SingleStage(
            model, ps=ps, num_microbatches=num_microbatches, grad_sync=grad_sync, seed=training.seed
        )
    executor = Pipeline(
        stages,
        ps=ps,
        schedule=pipeline.generator(),
        num_microbatches=num_microbatches,
        recompute=training.recompute,
        recompute_keeps=training.recompute_keeps,
        grad_sync=grad_sync,
        seed=training.seed,
        memory_limit=pipeline.memory_limit if pipeline.schedule == "auto" else None,
    )
    # after the Pipeline has made the regions that are recomputed: it goes around them
    offload_activations(stages, training.offload_activations)
    return executor


def count_parameters(stages: Mapping[int, nn.Module], ps: ParallelState) -> tuple[int, int]:
    """(parameters of the whole model without padding, a tied table counted once; this rank's, with padding).

    All-gather over pp.
    """
    local_parameters = dict(named_parameters(stages))
    full_sizes = {name: layout_of(parameter).numel for name, parameter in local_parameters.items()}
    # by name: both ends of the pipeline have the tied table under one name
    model_sizes: dict[str, int] = {}
    for rank_sizes in all_gather_objects(full_sizes, ps.group("pp")):
        model_sizes |= rank_sizes
    local_size = sum(parameter.numel() for parameter in local_parameters.values())
    return sum(model_sizes.values()), local_size


def count_trained(stages: Mapping[int, nn.Module], ps: ParallelState) -> int:
    """Parameters of the whole model, without padding, that want a gradient. All-gather over pp."""
    local = {name: layout_of(p).numel for name, p in named_parameters(stages) if p.requires_grad}
    whole: dict[str, int] = {}
    for sizes in all_gather_objects(local, ps.group("pp")):
        whole |= sizes
    return sum(whole.values())
