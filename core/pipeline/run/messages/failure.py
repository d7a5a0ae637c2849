"""A failure on one rank ends the step on every rank, and every rank says where it began."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.parallel_state.collectives.failure import LONGEST, Board, FailureReport, said, waited
from core.parallel_state.state import ParallelState


class PipelineError(RuntimeError):
    """A step failed on some rank; the message names rank, stage, microbatch and action, with the traceback."""


class PipelineValueError(PipelineError, ValueError):
    """The first failure was a ValueError, such as a batch that does not divide."""


@dataclass
class FailureBroadcast:
    """Around a block: turns an exception in it into a PipelineError of the first failure of the job, on every rank.

    Without it the other ranks would deadlock in messages and collectives that this rank never joins. The failed rank
    publishes what happened, then leaves its process groups, which makes the others' calls fail at once. A rank that
    only waited in vain names the rank that does not answer; it takes a tenth of the timeout and a second to find
    out. A single process raises its own exception, an interrupted one its interrupt.

    key: of the pipeline, the same on all ranks. call: the user's call, compared between ranks. position: returns
    what was under way.

    A class and no generator: contextlib takes our error for the generator's own where a StopIteration is the cause,
    and a `for` loop of the user's would end silently.
    """

    ps: ParallelState
    key: str
    call: str
    position: Callable[[], str]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        ps = self.ps
        if error is None or ps.world is None:
            return
        # whom this rank waited for in vain, if that is all that failed here
        missing_ranks, timed_out = waited(error, ps.world.ranks, ps.rank)
        description = f"rank {ps.rank}, {self.position()}: {type(error).__name__}: {said(error)}"
        # the failure is this rank's own: its traceback helps
        if not missing_ranks:
            lines = traceback.format_exception(error)
            # behind the cause, which is what is read first
            description += "\n" + "".join(line[:LONGEST] for line in lines).rstrip()

        timeout = ps.world.timeout.total_seconds()
        board = Board(self.key, ps.rank, ps.world.size, min(timeout, 1 + timeout / 10))
        _clear_frames(error)
        is_value_error = isinstance(error, ValueError)
        report = FailureReport(
            ps.rank, self.call, description, timed_out, missing_ranks, is_value_error
        )
        # publish before leaving the groups: who fails because of us must find our report
        board.tell(report)
        ps.abandon()
        first = board.first_failure(report)
        board.linger(first)
        if isinstance(error, Exception):
            error_type = PipelineValueError if first.wrong else PipelineError
            raise error_type(f"the step failed: {first.text}") from error


def _clear_frames(error: BaseException) -> None:
    """Forget the local variables of the frames that failed.

    gloo keeps a connection open, and the peer waiting, as long as anything refers to a message or collective that
    is under way.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
