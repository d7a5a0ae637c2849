"""From the stages of this rank to their optimizer and executor."""

from collections.abc import Mapping

from torch import nn

from core.autograd import GradSync, apply_recompute
from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedOptimizer, build_optimizer
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

    memory: reports what both hold.
    """
    # collectives inside: every rank reports memory, or none does
    if memory is not None:
        memory.at("model init")
    shard = DataParallel(stages, ps, **data_parallel.arguments())
    offload = data_parallel.offload_policy()
    sharded_optimizer = build_optimizer(shard, optimizer, offload=offload)
    if memory is not None:
        memory.holds(shard, sharded_optimizer)
        memory.at("optimizer init")
        memory.predict(offload)
    return shard, sharded_optimizer


def build_executor(
    stages: Mapping[int, nn.Module],
    pipeline: PipelineConfig,
    training: TrainingConfig,
    ps: ParallelState,
    grad_sync: GradSync,
) -> SingleStage | Pipeline:
    """A `Pipeline` over several ranks, a `SingleStage` on one, with activation checkpointing as set. Collective."""
    rows_per_replica = training.global_batch_size // ps.size("dp")
    num_microbatches = rows_per_replica // training.micro_batch_size
    # activation checkpointing is installed on the model here; a Pipeline does it stage by stage
    if ps.size("pp") == 1:
        (model,) = stages.values()
        apply_recompute(model, training.recompute, stage=getattr(model, "stage", None))
        return SingleStage(model, ps=ps, num_microbatches=num_microbatches, grad_sync=grad_sync, seed=training.seed)
    return Pipeline(
        stages,
        ps=ps,
        schedule=pipeline.generator(),
        num_microbatches=num_microbatches,
        recompute=training.recompute,
        grad_sync=grad_sync,
        seed=training.seed,
        memory_limit=pipeline.memory_limit,
    )


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
