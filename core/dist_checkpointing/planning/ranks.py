"""What concerns all ranks at once: which state they share, and that one rank's problem is everybody's."""

from collections.abc import Callable
from typing import TypeVar

from core.dist_checkpointing.planning.exchange import gather_json
from core.dist_checkpointing.storage.place import DiskFullError
from core.parallel_state import ParallelState, current_state, model_parallel_is_initialized

T = TypeVar("T")


class DamagedCheckpoint(ValueError):
    """The files are not those that were saved."""


_KINDS: dict[str, type[Exception]] = {
    DiskFullError.__name__: OSError,
    **{kind.__name__: kind for kind in (DamagedCheckpoint, FileNotFoundError, OSError, TimeoutError, ValueError)},
}


def default_state() -> ParallelState:
    """The current state, or a single process."""
    return current_state() if model_parallel_is_initialized() else ParallelState.single("cpu")


def agree(problem: Exception | None, ps: ParallelState) -> None:
    """Collective: raises on all ranks what one has as a problem, the others with its number in front.

    An error that is not known here is the nearest kind of it that is: a PermissionError is an OSError to all.
    """
    kinds = [kind.__name__ for kind in type(problem).__mro__ if kind.__name__ in _KINDS]
    told = gather_json(None if problem is None else [kinds[:1], str(problem)], ps.world, ps.device)
    if problem is not None:
        raise problem
    for rank, error in enumerate(told):
        if error is not None:
            raise (_KINDS[error[0][0]] if error[0] else RuntimeError)(f"rank {rank}: {error[1]}")


def problem_of(call: Callable[[], object]) -> Exception | None:
    """What a call raised: to be told to the other ranks before it is raised."""
    try:
        call()
    except Exception as error:
        return error
    return None


def from_first(call: Callable[[], T], ps: ParallelState) -> T:
    """Collective: what rank 0's call returns, a JSON value, or raises, on every rank."""
    found: list[T] = []
    agree(problem_of(lambda: found.append(call())) if ps.rank == 0 else None, ps)
    return gather_json(found, ps.world, ps.device)[0][0]
