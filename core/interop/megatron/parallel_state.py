"""Megatron's `parallel_state` over the current state: its argument names, its order of axes, its getters."""

from difflib import get_close_matches
from typing import Any
from weakref import WeakKeyDictionary

from core.interop.megatron.absent import absent_names
from core.parallel_state import current
from core.parallel_state.collectives.groups import DEFAULT_TIMEOUT_S
from core.parallel_state.current import current_state, model_parallel_is_initialized
from core.parallel_state.current import destroy_model_parallel as destroy_model_parallel
from core.parallel_state.getters import get_context_parallel_group as get_context_parallel_group
from core.parallel_state.getters import get_context_parallel_rank as get_context_parallel_rank
from core.parallel_state.getters import (
    get_context_parallel_world_size as get_context_parallel_world_size,
)
from core.parallel_state.getters import get_data_parallel_group as get_data_parallel_group
from core.parallel_state.getters import get_data_parallel_rank as get_data_parallel_rank
from core.parallel_state.getters import get_data_parallel_world_size as get_data_parallel_world_size
from core.parallel_state.getters import (
    get_expert_model_parallel_group as get_expert_model_parallel_group,
)
from core.parallel_state.getters import (
    get_expert_model_parallel_rank as get_expert_model_parallel_rank,
)
from core.parallel_state.getters import (
    get_expert_model_parallel_world_size as get_expert_model_parallel_world_size,
)
from core.parallel_state.getters import (
    get_pipeline_model_parallel_group as get_pipeline_model_parallel_group,
)
from core.parallel_state.getters import (
    get_pipeline_model_parallel_next_rank as get_pipeline_model_parallel_next_rank,
)
from core.parallel_state.getters import (
    get_pipeline_model_parallel_prev_rank as get_pipeline_model_parallel_prev_rank,
)
from core.parallel_state.getters import (
    get_pipeline_model_parallel_rank as get_pipeline_model_parallel_rank,
)
from core.parallel_state.getters import (
    get_pipeline_model_parallel_world_size as get_pipeline_model_parallel_world_size,
)
from core.parallel_state.getters import (
    get_tensor_model_parallel_group as get_tensor_model_parallel_group,
)
from core.parallel_state.getters import (
    get_tensor_model_parallel_rank as get_tensor_model_parallel_rank,
)
from core.parallel_state.getters import (
    get_tensor_model_parallel_world_size as get_tensor_model_parallel_world_size,
)
from core.parallel_state.getters import is_pipeline_first_stage as is_first
from core.parallel_state.getters import is_pipeline_last_stage as is_last
from core.parallel_state.state import ParallelState

# groups are those that torch's default group has
_NO_EFFECT = ("create_gloo_process_groups",)
# a state -> the chunks of each rank, as they were said when it was made
_chunks: WeakKeyDictionary[ParallelState, int] = WeakKeyDictionary()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    cp_comm_type: str = "all_gather",
    expert_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    debug: bool = False,
    order: str = "tp-cp-ep-dp-pp",
    distributed_timeout_minutes: float = DEFAULT_TIMEOUT_S / 60,
    **more: Any,
) -> ParallelState:
    """As Megatron's, whose `order` is innermost to outermost. Virtual stages are the chunks that a rank is given.

    sequence_parallel, cp_comm_type, debug: as for `core.parallel_state`; Megatron's TransformerConfig has 2 of them.
    Raises ValueError: an argument that asks for groups which are not here; sizes that do not fit the world.
    """
    # a size of 1, or an option that is off, asks for nothing; True is no size
    unsupported = [
        name
        for name, value in more.items()
        if name not in _NO_EFFECT and (value is True or value not in (None, False, 1))
    ]
    if unsupported:
        close = get_close_matches(unsupported[0], initialize_model_parallel.__annotations__, n=1)
        meant = f"; did you mean {close[0]}?" if close else "; leave them out"
        raise ValueError(
            f"{len(unsupported)} arguments ask for groups that are not here: {', '.join(unsupported)}{meant}"
        )
    # Megatron orders axes from the innermost to the outermost, we do it the other way round
    axes = [axis for axis in reversed(order.split("-")) if axis != "ep"]
    ps = current.initialize_model_parallel(
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        cp_comm_type=cp_comm_type,
        expert_model_parallel_size=expert_model_parallel_size,
        sequence_parallel=sequence_parallel,
        debug=debug,
        order="-".join(axes),
        distributed_timeout_minutes=distributed_timeout_minutes,
    )
    _chunks[ps] = virtual_pipeline_model_parallel_size or 1
    return ps


def turn_on_sequence_parallel() -> ParallelState:
    """The current state from now on splits sequences over tensor ranks; its virtual stages stay as many."""
    chunks = _chunks.get(current_state())
    ps = current.turn_on_sequence_parallel()
    if chunks is not None:
        _chunks[ps] = chunks
    return ps


def is_initialized() -> bool:
    """Whether a current state exists."""
    return model_parallel_is_initialized()


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the first stage; of virtual ones: whether it is chunk 0."""
    return is_first() and (ignore_virtual or not vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the last stage; of virtual ones: whether it is the last chunk.

    Raises ValueError: asked of a chunk of a state whose number of chunks nobody has said.
    """
    if ignore_virtual or vp_stage is None:
        return is_last()
    chunks = _chunks.get(current_state())
    if chunks is None or vp_stage >= chunks:
        known = "nobody has said" if chunks is None else f"was said to be {chunks}"
        raise ValueError(
            f"whether chunk {vp_stage} is the last depends on their number, which {known}; give "
            "initialize_model_parallel(virtual_pipeline_model_parallel_size=...) of this module"
        )
    return is_last() and vp_stage == chunks - 1


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first of this rank's tensor-parallel group."""
    return current_state().grid.members(current_state().rank, "tp")[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first of this rank's data-parallel group."""
    group = "dp-cp" if with_context_parallel else "dp"
    return current_state().grid.members(current_state().rank, group)[0]


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of this rank's first pipeline stage."""
    return current_state().grid.members(current_state().rank, "pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of this rank's last pipeline stage."""
    return current_state().grid.members(current_state().rank, "pp")[-1]


def get_embedding_group() -> Any:
    """The torch group of the pipeline's ends, over which a tied table's gradient is summed."""
    return current_state().torch_group("embedding").process_group


def get_expert_data_parallel_rank() -> int:
    """Position among the replicas of this rank's experts."""
    return current_state().index("edp")


def get_expert_data_parallel_world_size() -> int:
    """Replicas of this rank's experts."""
    return current_state().size("edp")


__getattr__ = absent_names(__name__)
