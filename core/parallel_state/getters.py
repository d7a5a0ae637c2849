"""Megatron's getters over the current state, for scripts that know them. Nothing inside `core/` calls these."""

from typing import Any

from core.parallel_state.collectives.groups import is_initialized
from core.parallel_state.current import current_state


def _group(name: str) -> Any:
    """A torch ProcessGroup of exactly the right ranks, one or more; None without torch.distributed."""
    if is_initialized():
        return current_state().torch_group(name).process_group
    return None


def get_tensor_model_parallel_world_size() -> int:
    """Ranks that share one layer's matmuls."""
    return current_state().size("tp")


def get_tensor_model_parallel_rank() -> int:
    """Position along the tensor axis."""
    return current_state().index("tp")


def get_tensor_model_parallel_group() -> Any:
    """The tensor axis's torch ProcessGroup."""
    return _group("tp")


def get_pipeline_model_parallel_world_size() -> int:
    """Number of ranks that hold pipeline stages of one replica."""
    return current_state().size("pp")


def get_pipeline_model_parallel_rank() -> int:
    """Position along the pipeline axis."""
    return current_state().index("pp")


def get_pipeline_model_parallel_group() -> Any:
    """The pipeline axis's torch ProcessGroup."""
    return _group("pp")


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage, cyclic."""
    return current_state().pipeline_neighbours()[0]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage, cyclic."""
    return current_state().pipeline_neighbours()[1]


def is_pipeline_first_stage() -> bool:
    """Whether this rank holds the first stage."""
    return current_state().is_first_stage


def is_pipeline_last_stage() -> bool:
    """Whether this rank holds the last stage."""
    return current_state().is_last_stage


def _data(with_context_parallel: bool) -> str:
    if with_context_parallel:
        return "dp-cp"
    return "dp"


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Replicas of the model."""
    return current_state().size(_data(with_context_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """Position among the replicas."""
    return current_state().index(_data(with_context_parallel))


def get_data_parallel_group(with_context_parallel: bool = False) -> Any:
    """The data axis's torch ProcessGroup."""
    return _group(_data(with_context_parallel))


def get_context_parallel_world_size() -> int:
    """Ranks that share one sequence."""
    return current_state().size("cp")


def get_context_parallel_rank() -> int:
    """Position along the context axis."""
    return current_state().index("cp")


def get_context_parallel_group() -> Any:
    """The context axis's torch ProcessGroup."""
    return _group("cp")


def get_expert_model_parallel_world_size() -> int:
    """Ranks that share one layer's experts."""
    return current_state().size("ep")


def get_expert_model_parallel_rank() -> int:
    """Position along the expert axis."""
    return current_state().index("ep")


def get_expert_model_parallel_group() -> Any:
    """The expert axis's torch ProcessGroup."""
    return _group("ep")
