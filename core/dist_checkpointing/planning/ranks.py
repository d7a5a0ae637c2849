"""Agreement of all ranks: which parallel state they share, and that an error of one rank is raised on all."""

from collections.abc import Callable
from typing import TypeVar

from core.dist_checkpointing.planning.exchange import gather_json
from core.dist_checkpointing.storage.checkpoint_dir import DiskFullError
from core.parallel_state import ParallelState, current_state, model_parallel_is_initialized

T = TypeVar("T")


class DamagedCheckpoint(ValueError):
    """The files are not those that were saved."""


# error types that travel between ranks by name
_ERROR_TYPES: dict[str, type[Exception]] = {
    DiskFullError.__name__: OSError,
    **{
        kind.__name__: kind
        for kind in (DamagedCheckpoint, FileNotFoundError, OSError, TimeoutError, ValueError)
    },
}


def default_state() -> ParallelState:
    """The current parallel state; without one, that of a single process on the CPU."""
    if model_parallel_is_initialized():
        return current_state()
    return ParallelState.single("cpu")


def agree(problem: Exception | None, ps: ParallelState) -> None:
    """Collective: raises on all ranks what one has as a problem, the others with its number in front.

    Without it the other ranks would wait in their next collective for a rank that has left: a deadlock.
    An error type that is not known here becomes its nearest known base: a PermissionError is an OSError to all.
    """
    report = None
    if problem is not None:
        known_types = [
            kind.__name__ for kind in type(problem).__mro__ if kind.__name__ in _ERROR_TYPES
        ]
        report = [known_types[:1], str(problem)]
    reports = gather_json(report, ps.world, ps.device)
    if problem is not None:
        raise problem
    for rank, remote_report in enumerate(reports):
        if remote_report is not None:
            type_names, message = remote_report
            if type_names:
                error_type = _ERROR_TYPES[type_names[0]]
            else:
                error_type = RuntimeError
            raise error_type(f"rank {rank}: {message}")


def problem_of(call: Callable[[], object]) -> Exception | None:
    """What a call raised, not yet raised here: `agree` reports it to the other ranks first."""
    try:
        call()
    except Exception as error:
        return error
    return None


def from_first(call: Callable[[], T], ps: ParallelState) -> T:
    """Collective: what rank 0's call returns, a JSON value, or raises, on every rank."""
    results: list[T] = []
    problem = None
    if ps.rank == 0:
        problem = problem_of(lambda: results.append(call()))
    agree(problem, ps)
    return gather_json(results, ps.world, ps.device)[0][0]
