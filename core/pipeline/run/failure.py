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
class ToldToAll:
    """Around a block: turns an exception in it into a PipelineError of the first failure of the job, on every rank.

    Others wait for this rank in messages and collectives: after publishing what happened it leaves its groups,
    which makes their calls fail at once. Who only waited in vain names the rank that does not answer; it takes a
    tenth of the timeout and a second to find out. A single process sees its own exception, an interrupted one its
    interrupt. key: of the pipeline, the same on all ranks. call: the user's, compared between ranks. where: what was
    under way.

    A class: of a generator, contextlib takes our error for the generator's own where a StopIteration is the cause,
    and a `for` loop of the user's would end without a word.
    """

    ps: ParallelState
    key: str
    call: str
    where: Callable[[], str]

    def __enter__(self) -> None:
        """Nothing is to be done before."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """After an exception: a PipelineError."""
        ps = self.ps
        if error is None or ps.world is None:
            return
        ranks, late = waited(error, ps.world.ranks, ps.rank)
        mine = f"rank {ps.rank}, {self.where()}: {type(error).__name__}: {said(error)}"
        if not ranks:
            mine = "".join(line[:LONGEST] for line in traceback.format_exception(error)) + mine
        timeout = ps.world.timeout.total_seconds()
        board = Board(self.key, ps.rank, ps.world.size, min(timeout, 1 + timeout / 10))
        _let_go(error)
        report = FailureReport(ps.rank, self.call, mine, late, ranks, isinstance(error, ValueError))
        board.tell(report)
        ps.abandon()
        first = board.first_failure(report)
        board.linger(first)
        if isinstance(error, Exception):
            made = PipelineValueError if first.wrong else PipelineError
            raise made(f"the step failed. The first failure, its traceback before it:\n{first.text}") from error


def _let_go(error: BaseException) -> None:
    """Forget the local variables of the frames that failed: gloo keeps a connection open, and the peer waiting, as
    long as somebody holds one message or collective under way."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
