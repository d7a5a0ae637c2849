"""A failure on one rank ends the step on every rank, and every rank says where it began."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core.parallel_state.collectives.failure import first_failure
from core.parallel_state.state import ParallelState


class PipelineError(RuntimeError):
    """A step failed on some rank; the message names rank, stage, microbatch and action, with the traceback."""


class PipelineValueError(PipelineError, ValueError):
    """The first failure was a ValueError, such as a batch that does not divide."""


@contextmanager
def told_to_all(ps: ParallelState, key: str, where: Callable[[], str]) -> Iterator[None]:
    """Turn an exception in the block into a PipelineError of the first failure of the job, on every rank.

    Others wait for this rank in messages and collectives: after publishing what happened it leaves its groups,
    which makes their calls fail at once. A single process sees its own exception. where: what was under way.
    """
    try:
        yield
    except Exception as error:
        if ps.world is None:
            raise
        mine = f"rank {ps.rank}, {where()}: {type(error).__name__}: {error}"
        kind, _, text = first_failure(
            key, f"{int(isinstance(error, ValueError))}:{traceback.format_exc()}{mine}"
        ).partition(":")
        _let_go(error)
        ps.abandon()
        made = PipelineValueError if kind == "1" else PipelineError
        raise made(f"the step failed. The first failure, its traceback before it:\n{text}") from error


def _let_go(error: BaseException) -> None:
    """Forget the local variables of the frames that failed: gloo keeps a connection open, and the peer waiting, as
    long as somebody holds one message or collective under way."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
