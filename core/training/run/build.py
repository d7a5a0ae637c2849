"""From a run's configuration to the stages of this rank and their executor."""

from collections.abc import Mapping

from torch import nn

from core.autograd import GradSync, apply_recompute
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, gpt_stages
from core.optimizer import OptimizerConfig, ShardedOptimizer, build_optimizer
from core.parallel_state import ParallelState, layout_of
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.modules import named_parameters
from core.pipeline import Pipeline, SingleStage
from core.training.config import DataParallelConfig, ModelConfig, PipelineConfig, TrainingConfig
from core.training.log.memory import MemoryReport


def build_stages(
    model: ModelConfig, pipeline: PipelineConfig, vocab_size: int, sequence_length: int, ps: ParallelState
) -> dict[int, GPTModel]:
    """stage -> model of this rank; one whole model where there is one pipeline rank."""
    ranks = ps.size("pp")
    return gpt_stages(
        model.transformer(),
        model.spec(),
        vocab_size,
        sequence_length,
        placement=pipeline.placement(ranks) if ranks > 1 else (0,),
        share_embeddings_and_output_weights=model.tie_embeddings,
        parallel=ps,
        seed=model.seed,
        parallel_output=True,  # whoever reads them gathers
    )


def build_sharded(
    stages: Mapping[int, nn.Module],
    data_parallel: DataParallelConfig,
    optimizer: OptimizerConfig,
    ps: ParallelState,
    memory: MemoryReport | None = None,
) -> tuple[DataParallel, ShardedOptimizer]:
    """Who divides and sums, and the optimizer over it, as the run says; `memory` tells what they hold. Collective."""
    if memory is not None:
        memory.at("model init")
    shard, offload = DataParallel(stages, ps, **data_parallel.arguments()), data_parallel.placement()
    built = build_optimizer(shard, optimizer, offload=offload)
    if memory is not None:
        memory.holds(shard, built)
        memory.at("optimizer init")
        memory.predict(offload)
    return shard, built


def build_executor(
    stages: Mapping[int, nn.Module],
    pipeline: PipelineConfig,
    training: TrainingConfig,
    ps: ParallelState,
    grad_sync: GradSync,
) -> SingleStage | Pipeline:
    """A `Pipeline` over several ranks, a `SingleStage` on one; recomputation as the run says. Collective."""
    count = training.global_batch_size // ps.size("dp") // training.micro_batch_size
    if ps.size("pp") == 1:
        (model,) = stages.values()
        apply_recompute(model, training.recompute, stage=getattr(model, "stage", None))
        return SingleStage(model, ps=ps, num_microbatches=count, grad_sync=grad_sync, seed=training.seed)
    return Pipeline(
        stages,
        ps=ps,
        schedule=pipeline.schedule,
        num_microbatches=count,
        recompute=training.recompute,
        grad_sync=grad_sync,
        seed=training.seed,
        memory_limit=pipeline.memory_limit,
    )


def count_parameters(stages: Mapping[int, GPTModel], ps: ParallelState) -> tuple[int, int]:
    """True parameters of the whole model, a table tied over both ends once; and this rank's, with padding.

    All-gather over pp.
    """
    here = dict(named_parameters(stages))
    everywhere: dict[str, int] = {}
    for part in all_gather_objects({name: layout_of(p).numel for name, p in here.items()}, ps.group("pp")):
        everywhere |= part
    return sum(everywhere.values()), sum(p.numel() for p in here.values())
