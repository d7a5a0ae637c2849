"""The failure of a job: every rank finds out who failed first, through the rendezvous store, which needs no group.

A rank that fails by itself reports it. One that waited in vain reports for whom, and reads for a moment what the
others report: a rank that is waited for and reports nothing failed first, and all ranks name it. No deadlock is
silent.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from core.parallel_state.collectives.groups import Group, is_initialized

_PACKAGE = __name__.rpartition(".")[0]
POLL_S = 0.02
LONGEST = 20_000  # characters of what an exception says
# how long the store outlives the first ranks that know the verdict, for late ones
LINGER_S = 5.0
# on the rank whose process the store lives in
HOST_LINGER_S = 30.0
# a connection that closed needs no patience: whoever closed it has told why, or cannot
GONE_S = 1.0


class Unanswered(RuntimeError):
    """A message or collective that did not end; `ranks`: the global ranks that were waited for."""

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


@dataclass(frozen=True)
class FailureReport:
    """What one rank reports when a call ends with an exception.

    call: what it was in, such as "step 3". text: for people. timed_out: its own wait reached the timeout, in contrast
    to a connection that a peer closed. waits_for: global ranks; empty if the exception is its own. wrong: whether the
    first failure was a ValueError.
    """

    rank: int
    call: str
    text: str
    timed_out: bool = False
    waits_for: tuple[int, ...] = ()
    wrong: bool = False
    guilty: tuple[int, ...] = ()  # of a verdict: who will not come to read it


def said(error: BaseException) -> str:
    """Its text, of a length that a store takes; a program's own exception class may fail to make one."""
    try:
        text = str(error)
    except Exception:
        return "(its text cannot be made)"
    if len(text) < LONGEST:
        return text
    return f"{text[:LONGEST]} ... ({len(text)} characters)"


def _is_transport_failure(error: BaseException) -> bool:
    """Whether the transport raised it, not our code or the user's."""
    text = said(error)
    return isinstance(error, (Unanswered, dist.DistError)) or (
        isinstance(error, RuntimeError)
        and ("gloo/" in text or "was closed after a failure" in text)
    )


def check_answered(error: RuntimeError, label: str, group: Group) -> None:
    """Raise Unanswered, which names the other ranks of `group`, for an error that the transport raised.

    Raises ValueError where it is that two ranks were given one accelerator.
    """
    if "Duplicate GPU" in said(error):
        raise ValueError(
            f"two ranks share one accelerator, which its backend refuses ({said(error).splitlines()[-1].strip()}): "
            "start as many processes on a host as it has devices (--nproc-per-node), or let them share, with "
            "messages through host memory: --parallel.backend gloo, launch(backend='gloo') (slow)"
        ) from error
    if not _is_transport_failure(error) or isinstance(error, Unanswered):
        return
    others = tuple(rank for rank in group.ranks if rank != group.ranks[group.rank])
    names = (
        f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(map(str, others))}"
    )
    raise Unanswered(
        f"rank {group.ranks[group.rank]} waited in vain for {names} at {label} (group {group.name}, at most "
        f"{group.timeout.total_seconds():g} s): that rank failed, ended, or runs other modules or another order of "
        f"them (random.random() and numpy draw otherwise on each); its own output says why ({said(error)})",
        others,
    ) from error


def waited(
    error: BaseException, all_ranks: Collection[int], rank: int
) -> tuple[tuple[int, ...], bool]:
    """(the ranks that an exception is the want of, whether by a timeout); no ranks if the exception is no such."""
    chain: list[BaseException] = []
    result: BaseException | None = error
    while result is not None and result not in chain:
        chain.append(result)
        result = result.__cause__ or result.__context__
    # the innermost: later errors are often about cleaning up after it
    transport_failure = next((e for e in reversed(chain) if _is_transport_failure(e)), None)
    if transport_failure is None:
        return (), False
    named = next((e.ranks for e in chain if isinstance(e, Unanswered)), None)
    ranks = named or next((g.ranks for e in chain for g in _groups(e)), None) or tuple(all_ranks)
    return tuple(r for r in ranks if r != rank), "imed out" in said(transport_failure)


def _groups(error: BaseException) -> Iterator[Group]:
    """The groups of our collectives that an exception came through, the innermost first."""
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    for frame in reversed(frames):
        if frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            names = frame.f_locals
            group = names.get("group")
            # a copy (before Python 3.13), which the frame would keep
            if isinstance(names, dict):
                names.clear()
            if isinstance(group, Group):
                yield group


class Board:
    """What the ranks of a job report to each other under `key` when it fails. Made before the groups are left.

    world: how many ranks. moment_s: how long to wait for others' reports, after a timeout of one's own.
    """

    def __init__(self, key: str, rank: int, world: int, moment_s: float) -> None:
        self._store: Any = c10d._get_default_store() if is_initialized() else None
        self._key = f"paracore/failure/{key}"
        self.rank = rank
        self.world = world
        self.moment_s = moment_s

    def tell(self, own_report: FailureReport) -> None:
        """Before leaving the groups: whoever fails because of that finds it here. An exception of one's own is the
        job's first failure, unless there is one."""

        def write() -> None:
            self._store.set(f"{self._key}/{own_report.rank}", json.dumps(asdict(own_report)))
            if not own_report.waits_for:
                self._settle_first(own_report)

        self._call_store(write, GONE_S + self.moment_s)

    def first_failure(self, own_report: FailureReport) -> FailureReport:
        """After `tell`: what everybody is to name, found within a moment."""

        def read_report() -> FailureReport:
            verdict = self._settle_first(self._decide(own_report))
            self._store.add(f"{self._key}/known", 1)
            return verdict

        return self._call_store(read_report, GONE_S + 2 * self.moment_s) or self._without_store(
            own_report
        )

    def linger(self, verdict: FailureReport) -> None:
        """Wait until all ranks that will come know the verdict, or for a while: the store may live in this process,
        and a launcher may end all others when one has ended."""
        if self.rank or _launcher_keeps_it():
            seconds = LINGER_S
        else:
            seconds = HOST_LINGER_S

        def wait() -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if self._store.add(f"{self._key}/known", 0) >= self.world - len(verdict.guilty):
                    return
                time.sleep(POLL_S)

        self._call_store(wait, seconds + GONE_S)

    def _call_store(self, call: Callable[[], Any], seconds: float) -> Any:
        """What `call` says, or None: the store is gone, or its process is stopped, where no timeout of its own
        would end a call."""
        result: list[Any] = []

        def run() -> None:
            # torch.distributed.DistError and its kin
            with suppress(RuntimeError):
                result.append(call())

        if self._store is not None:
            # a thread, because a call of the store cannot be interrupted; a daemon, so that it holds up no exit
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join(seconds)
            if not result:
                self._store = None
        if result:
            return result[0]
        return None

    def _settle_first(self, verdict: FailureReport) -> FailureReport:
        """The first verdict stands."""
        return _read(self._store.compare_set(f"{self._key}/first", "", json.dumps(asdict(verdict))))

    def _report_at(self, name: Any) -> FailureReport | None:
        name = f"{self._key}/{name}"
        if self._store.check([name]):
            return _read(self._store.get(name))
        return None

    def _decide(self, own_report: FailureReport) -> FailureReport:
        """The first failure, as far as this rank can know."""
        if not own_report.waits_for:
            return own_report
        if own_report.timed_out:
            patience = self.moment_s
        else:
            patience = min(GONE_S, self.moment_s)
        end = time.monotonic() + patience
        while True:
            if (first := self._report_at("first")) is not None:
                return first
            reports = {own_report.rank: own_report}
            silent = _silent(own_report, reports, self._report_at)
            # a peer that closed its connection and wrote nothing before it did so will not write any more
            dead = (
                not own_report.timed_out
                and len(own_report.waits_for) == 1
                and silent == set(own_report.waits_for)
            )
            if dead or not silent or time.monotonic() > end:
                return _verdict(own_report, reports, silent)
            time.sleep(POLL_S)

    def _without_store(self, own_report: FailureReport) -> FailureReport:
        """The store went with its process: rank 0's, if no launcher keeps it."""
        if not own_report.waits_for or self.rank == 0 or _launcher_keeps_it():
            return own_report
        text = (
            f"rank 0 is gone or stopped, and with it the store in which ranks tell who failed first: see what rank 0 "
            f"printed last\n{own_report.text}"
        )
        return replace(own_report, text=text, guilty=(0,))


def _launcher_keeps_it() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _read(text: bytes) -> FailureReport:
    result = json.loads(text)
    return FailureReport(**result | {name: tuple(result[name]) for name in ("waits_for", "guilty")})


def _silent(
    own_report: FailureReport, reports: dict[int, FailureReport], read_report: Any
) -> set[int]:
    """Ranks that are waited for, directly or by others, and have reported nothing; reports found are added."""
    silent = set()
    to_visit = list(own_report.waits_for)
    while to_visit:
        rank = to_visit.pop()
        if rank in reports or rank in silent:
            continue
        result = read_report(rank)
        if result is None:
            silent.add(rank)
        else:
            reports[rank] = result
            to_visit += result.waits_for
    return silent


def _verdict(
    own_report: FailureReport, reports: Mapping[int, FailureReport], silent: Collection[int]
) -> FailureReport:
    """Who is to blame, from all reports.

    Ranks that were waited for and reported nothing; else those in another call than most; else those who only saw
    that others had given up: they came too late. If all waited for each other, all of them.
    """
    lines = [reports[rank].text for rank in sorted(reports)]
    calls = [report.call for report in reports.values()]
    # ranks are in one call if all is well: the call of most is taken for the right one
    common_call = max(calls, key=calls.count)
    elsewhere = [rank for rank in sorted(reports) if reports[rank].call != common_call]
    came_late = [rank for rank in sorted(reports) if not reports[rank].timed_out]
    if silent:
        # whoever timed out closed its connections too: that others saw one closed then says nothing of the silent
        if any(report.timed_out for report in reports.values()):
            reason = "told nothing: killed, stopped, in a loop, in another call, or never came"
        else:
            reason = "is gone: it ended without a word, or was killed"
        blame = f"{_ranks(silent)} {reason}"
    elif elsewhere:
        other_call = reports[elsewhere[0]].call
        blame = f"{_ranks(elsewhere)} was in {other_call}, the others in {common_call}: all ranks must make one call"
    elif came_late and len(came_late) < len(reports):
        blame = f"{_ranks(came_late)} came when the others had given up"
    else:
        blame = f"{_ranks(reports)} waited for each other"
    return replace(own_report, text="\n".join([blame, *lines]), guilty=tuple(sorted(silent)))


def _ranks(ranks: Collection[int]) -> str:
    each = sorted(ranks)
    return f"rank{'s'[: len(each) > 1]} {', '.join(map(str, each))}"
