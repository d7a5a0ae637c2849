"""Who am I, who are my peers, how is each tensor spread, which seed is mine; and every collective call.

Names are loaded at first use, so that the pure parts (`config`, `grid`) import without torch.
"""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from core.parallel_state.config import ParallelConfig as ParallelConfig
    from core.parallel_state.context import ContextRows as ContextRows
    from core.parallel_state.context import context_batch as context_batch
    from core.parallel_state.current import current_state as current_state
    from core.parallel_state.current import destroy_model_parallel as destroy_model_parallel
    from core.parallel_state.current import initialize_model_parallel as initialize_model_parallel
    from core.parallel_state.current import (
        model_parallel_is_initialized as model_parallel_is_initialized,
    )
    from core.parallel_state.environment import launch as launch
    from core.parallel_state.environment import local_device as local_device
    from core.parallel_state.getters import get_context_parallel_group as get_context_parallel_group
    from core.parallel_state.getters import get_context_parallel_rank as get_context_parallel_rank
    from core.parallel_state.getters import (
        get_context_parallel_world_size as get_context_parallel_world_size,
    )
    from core.parallel_state.getters import get_data_parallel_group as get_data_parallel_group
    from core.parallel_state.getters import get_data_parallel_rank as get_data_parallel_rank
    from core.parallel_state.getters import (
        get_data_parallel_world_size as get_data_parallel_world_size,
    )
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
    from core.parallel_state.getters import is_pipeline_first_stage as is_pipeline_first_stage
    from core.parallel_state.getters import is_pipeline_last_stage as is_pipeline_last_stage
    from core.parallel_state.grid import Grid as Grid
    from core.parallel_state.initial import Init as Init
    from core.parallel_state.initial import initialize_parameters as initialize_parameters
    from core.parallel_state.layout import Layout as Layout
    from core.parallel_state.layout import layout_of as layout_of
    from core.parallel_state.random import mix32 as mix32
    from core.parallel_state.random import seeded as seeded
    from core.parallel_state.state import ParallelState as ParallelState
else:
    __getattr__, __dir__ = lazy_exports(__name__)
