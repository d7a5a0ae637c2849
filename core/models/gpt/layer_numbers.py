"""Which layers a stage of a GPT holds, and which are of a kind."""

from core.parallel_state import ParallelState
from core.parallel_state.modules import Stack
from core.pipeline.schedule.partition import even
from core.transformer.transformer_config import TransformerConfig


def stack_of(config: TransformerConfig) -> Stack:
    """All layers of a model; where some have experts and others not, parameters of `mlp` are of some layers only."""
    kinds = tuple(config.has_experts(layer) for layer in range(config.num_layers))
    return Stack(config.num_layers, {"mlp": kinds} if len(set(kinds)) > 1 else {})


def stage_layers(num_layers: int, ps: ParallelState) -> range:
    """The even share of layers of this rank's pipeline stage, as global numbers."""
    stage, stages = ps.coordinate["pp"], ps.config.pipeline
    return even(num_layers, stages)[stage]
