"""The failure of a job: a board on the rendezvous store, which needs no working group, says who it was on every rank.

A rank that fails by itself says so. One that waited in vain says for whom, and looks a moment at what the others
say: whoever is waited for and says nothing is the one, and everybody names that one.
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

_HERE = __name__.rpartition(".")[0]
POLL_S = 0.02
LONGEST = 20_000  # characters of what an exception says
LINGER_S = 5.0  # how long the store outlives the first who know, for those that are late
HOST_LINGER_S = 30.0  # on the rank whose process the store lives in
GONE_S = 1.0  # a connection that closed needs no patience: whoever closed it has told why, or cannot


class Unanswered(RuntimeError):
    """A message or collective that did not end; `ranks`: the global ranks that were waited for."""

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


@dataclass(frozen=True)
class FailureReport:
    """What one rank tells when a call ends with an exception.

    call: what it was in, such as "step 3". text: for people. late: its own patience had an end, in contrast to a
    connection that somebody closed. waits_for: global ranks; empty if the exception is its own. wrong: whether the
    first failure was a ValueError.
    """

    rank: int
    call: str
    text: str
    late: bool = False
    waits_for: tuple[int, ...] = ()
    wrong: bool = False
    guilty: tuple[int, ...] = ()  # of a verdict: who will not come to read it


def said(error: BaseException) -> str:
    """Its text, of a length that a store takes; somebody's own exception may have none."""
    try:
        text = str(error)
    except Exception:
        return "(its text cannot be made)"
    return text if len(text) < LONGEST else f"{text[:LONGEST]} ... ({len(text)} characters)"


def _lost(error: BaseException) -> bool:
    """Whether the transport says so, not our code or the user's."""
    text = said(error)
    return isinstance(error, (Unanswered, dist.DistError)) or (
        isinstance(error, RuntimeError) and ("gloo/" in text or "was closed after a failure" in text)
    )


def waited(error: BaseException, everyone: Collection[int], rank: int) -> tuple[tuple[int, ...], bool]:
    """(the ranks that an exception is the want of, whether by a timeout); no ranks if the exception is no such."""
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain:
        chain.append(found)
        found = found.__cause__ or found.__context__
    lost = next((e for e in reversed(chain) if _lost(e)), None)
    if lost is None:
        return (), False
    named = next((e.ranks for e in chain if isinstance(e, Unanswered)), None)
    ranks = named or next((g.ranks for e in chain for g in _groups(e)), None) or tuple(everyone)
    return tuple(r for r in ranks if r != rank), "imed out" in said(lost)


def _groups(error: BaseException) -> Iterator[Group]:
    """The groups of our collectives that an exception came through, the innermost first."""
    frames, step = [], error.__traceback__
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    for frame in reversed(frames):
        if frame.f_globals.get("__name__", "").startswith(_HERE):
            names = frame.f_locals
            group = names.get("group")
            if isinstance(names, dict):  # a copy (before Python 3.13), which the frame would keep
                names.clear()
            if isinstance(group, Group):
                yield group


class Board:
    """What the ranks of a job tell each other under `key` when it fails. Made before the groups are left.

    world: how many ranks. moment_s: how long to wait for what others tell, after a timeout of one's own.
    """

    def __init__(self, key: str, rank: int, world: int, moment_s: float) -> None:
        self._store: Any = c10d._get_default_store() if is_initialized() else None
        self._key, self.rank, self.world, self.moment_s = f"paracore/failure/{key}", rank, world, moment_s

    def tell(self, mine: FailureReport) -> None:
        """Before leaving the groups: whoever fails because of that finds it here. An exception of one's own is the
        job's first failure, unless there is one."""

        def write() -> None:
            self._store.set(f"{self._key}/{mine.rank}", json.dumps(asdict(mine)))
            if not mine.waits_for:
                self._settle(mine)

        self._asked(write, GONE_S + self.moment_s)

    def first_failure(self, mine: FailureReport) -> FailureReport:
        """After `tell`: what everybody is to name, found within a moment."""

        def ask() -> FailureReport:
            verdict = self._settle(self._judge(mine))
            self._store.add(f"{self._key}/known", 1)
            return verdict

        return self._asked(ask, GONE_S + 2 * self.moment_s) or self._without_store(mine)

    def linger(self, verdict: FailureReport) -> None:
        """Until everybody who will come knows, or for a while: the store may live in this process, and a launcher
        may end all others when one has ended."""
        seconds = LINGER_S if self.rank or _launcher_keeps_it() else HOST_LINGER_S

        def wait() -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if self._store.add(f"{self._key}/known", 0) >= self.world - len(verdict.guilty):
                    return
                time.sleep(POLL_S)

        self._asked(wait, seconds + GONE_S)

    def _asked(self, call: Callable[[], Any], seconds: float) -> Any:
        """What `call` says, or None: the store is gone, or its process is stopped, where no timeout of its own
        would end a call."""
        found: list[Any] = []

        def run() -> None:
            with suppress(RuntimeError):  # torch.distributed.DistError and its kin
                found.append(call())

        if self._store is not None:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join(seconds)
            if not found:
                self._store = None
        return found[0] if found else None

    def _settle(self, verdict: FailureReport) -> FailureReport:
        """The first verdict stands."""
        return _read(self._store.compare_set(f"{self._key}/first", "", json.dumps(asdict(verdict))))

    def _told(self, name: Any) -> FailureReport | None:
        name = f"{self._key}/{name}"
        return _read(self._store.get(name)) if self._store.check([name]) else None

    def _judge(self, mine: FailureReport) -> FailureReport:
        """What this rank takes for the first failure."""
        if not mine.waits_for:
            return mine
        end = time.monotonic() + (self.moment_s if mine.late else min(GONE_S, self.moment_s))
        while True:
            if (first := self._told("first")) is not None:
                return first
            told = {mine.rank: mine}
            silent = _silent(mine, told, self._told)
            dead = not mine.late and len(mine.waits_for) == 1 and silent == set(mine.waits_for)
            if dead or not silent or time.monotonic() > end:
                return _verdict(mine, told, silent)
            time.sleep(POLL_S)

    def _without_store(self, mine: FailureReport) -> FailureReport:
        """The store went with its process: rank 0's, if no launcher keeps it."""
        if not mine.waits_for or self.rank == 0 or _launcher_keeps_it():
            return mine
        text = (
            f"rank 0 is gone or stopped, and with it the store in which ranks tell who failed first: see what rank 0 "
            f"printed last\n{mine.text}"
        )
        return replace(mine, text=text, guilty=(0,))


def _launcher_keeps_it() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _read(text: bytes) -> FailureReport:
    found = json.loads(text)
    return FailureReport(**found | {name: tuple(found[name]) for name in ("waits_for", "guilty")})


def _silent(mine: FailureReport, told: dict[int, FailureReport], ask: Any) -> set[int]:
    """Who is waited for, by way of those who told (they are added to `told`), and has told nothing."""
    silent, todo = set(), list(mine.waits_for)
    while todo:
        rank = todo.pop()
        if rank in told or rank in silent:
            continue
        found = ask(rank)
        if found is None:
            silent.add(rank)
        else:
            told[rank] = found
            todo += found.waits_for
    return silent


def _verdict(mine: FailureReport, told: Mapping[int, FailureReport], silent: Collection[int]) -> FailureReport:
    """Whoever was waited for and told nothing; else those in another call than most; else those who only saw that
    others had given up: they came too late. If all waited for each other, all of them."""
    lines = [told[rank].text for rank in sorted(told)]
    calls = [report.call for report in told.values()]
    usual = max(calls, key=calls.count)
    apart = [rank for rank in sorted(told) if told[rank].call != usual]
    late = [rank for rank in sorted(told) if not told[rank].late]
    if silent:
        why = "told nothing: killed, stopped, in a loop, in another call, or never came"
        blame = f"{_ranks(silent)} {why if mine.late else 'is gone: it ended without a word, or was killed'}"
    elif apart:
        blame = f"{_ranks(apart)} was in {told[apart[0]].call}, the others in {usual}: all ranks must make one call"
    elif late and len(late) < len(told):
        blame = f"{_ranks(late)} came when the others had given up"
    else:
        blame = f"{_ranks(told)} waited for each other"
    return replace(mine, text="\n".join([blame, *lines]), guilty=tuple(sorted(silent)))


def _ranks(ranks: Collection[int]) -> str:
    each = sorted(ranks)
    return f"rank{'s'[: len(each) > 1]} {', '.join(map(str, each))}"
