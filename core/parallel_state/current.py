"""The one current state, for the roof: nothing inside `core/` below it reads this, except as a default argument."""

from dataclasses import replace

from core.field_names import tells_names
from core.parallel_state.collectives.groups import world
from core.parallel_state.config import ParallelConfig
from core.parallel_state.state import ParallelState

_current: ParallelState | None = None
# what others call the sizes
_SHORT = {
    "tp": "did you mean tensor_model_parallel_size?",
    "pp": "did you mean pipeline_model_parallel_size?",
    "cp": "did you mean context_parallel_size?",
    "ep": "did you mean expert_model_parallel_size?",
    "dp": "leave it out: data ranks are what is left of the world",
}
# of a process that never initialized one
_alone: ParallelState | None = None


@tells_names(remedies=_SHORT)
def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    cp_comm_type: str = "all_gather",
    ulysses: int | None = None,
    expert_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    order: str = "pp-dp-cp-tp",
    device: str | None = None,
    distributed_timeout_minutes: float | None = None,
    debug: bool = False,
) -> ParallelState:
    """Build the parallel state, make it current and return it. Collective over the default process group.

    The data-parallel size is what is left of the world. `order` is outermost to innermost, "pp-dp-cp-tp".
    cp_comm_type, ulysses: how context ranks see each other's keys, see `ParallelConfig`.
    Without a default process group this is a single process, and no group is created.
    Raises ValueError with every wrong combination and the nearest valid ones, before any group is created.
    """
    global _current  # the only global state of `core`
    if virtual_pipeline_model_parallel_size not in (None, 1):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={virtual_pipeline_model_parallel_size}: stages per rank are the "
            "schedule's, gpt_stages(..., placement=schedules.placement('interleaved-1f1b', pipeline, chunks)); "
            "initialize_model_parallel of core.interop.megatron.parallel_state takes it as Megatron's does"
        )
    config = ParallelConfig(
        tensor=tensor_model_parallel_size,
        pipeline=pipeline_model_parallel_size,
        context=context_parallel_size,
        cp_comm_type=cp_comm_type,
        ulysses=ulysses,
        expert=expert_model_parallel_size,
        sequence_parallel=sequence_parallel,
        order=tuple(order.split("-")),
    )
    if _current is not None:
        raise ValueError(
            "the model parallel state is already initialized; call destroy_model_parallel() first"
        )
    if distributed_timeout_minutes is None:
        timeout_s = None
    else:
        timeout_s = 60 * distributed_timeout_minutes
    _current = ParallelState.build(config, device=device, timeout_s=timeout_s, debug=debug)
    return _current


def current_state() -> ParallelState:
    """The current state; a single process that never initialized one gets a state of one rank.

    Raises ValueError: several processes, and nobody said how they are laid out.
    """
    global _alone
    if _current is not None:
        return _current
    if world()[1] > 1:
        raise ValueError(
            f"{world()[1]} processes but no parallel state: call parallel_state.initialize_model_parallel(...)"
        )
    if _alone is None:
        _alone = ParallelState.single()
    return _alone


def turn_on_sequence_parallel() -> ParallelState:
    """The current state from now on: the same groups, and models made of it split sequences over tensor ranks."""
    global _current
    state = current_state()
    if not state.config.sequence_parallel:
        state = _current = replace(state, config=replace(state.config, sequence_parallel=True))
    return state


def model_parallel_is_initialized() -> bool:
    """Whether a current state exists."""
    return _current is not None


def destroy_model_parallel() -> None:
    """Leave the current state's groups and forget it; the default process group stays."""
    global _current
    state = _current
    _current = None
    if state is not None:
        state.destroy()
