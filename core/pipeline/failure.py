"""A failure on one rank ends the step on every rank, and every rank says where it began."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core.parallel_state.collectives.failure import first_failure
from core.parallel_state.state import ParallelState
from core.pipeline.actions import Action


class PipelineError(RuntimeError):
    """A step failed on some rank; the message names rank, stage, microbatch and action, with the traceback."""


@contextmanager
def told_to_all(ps: ParallelState, key: str, doing: Callable[[], Action | None]) -> Iterator[None]:
    """Turn an exception in the block into a PipelineError of the first failure of the job, on every rank.

    Others wait for this rank in messages and collectives: after publishing what happened it leaves its groups,
    which makes their calls fail at once. A single process sees its own exception.
    """
    try:
        yield
    except Exception as error:
        if ps.world is None:
            raise
        action = doing()
        where = "after its last action"
        if action is not None:
            of = "" if action.microbatch is None else f", microbatch {action.microbatch}"
            where = f"stage {action.stage}{of}, action {action.kind} ({action})"
        mine = f"rank {ps.rank}, {where}: {type(error).__name__}: {error}"
        text = first_failure(key, f"{traceback.format_exc()}{mine}")
        ps.abandon()
        raise PipelineError(f"the step failed. The first failure, its traceback before it:\n{text}") from error
