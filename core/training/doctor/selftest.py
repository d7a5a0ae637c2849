"""Each collective once between processes of this machine, its result checked and its rate measured; never a hang.

Two processes over gloo are forked for it, or it runs on the world that torchrun started. Every wait is bounded, and
a process that does not answer is killed.
"""

import json
import os
import select
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from core.parallel_state.collectives import (
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    irecv,
    isend,
    reduce_scatter,
)
from core.parallel_state.collectives.groups import init_world, world_group
from core.training.doctor.check import Check

RANKS = 2
BYTES = 4 << 20  # of the message whose rate is told
WAIT_S = 4.0  # for one message
DEADLINE_S = 8.0  # for everything
REMEDY = (
    "processes of this machine cannot talk: name the network interface, export GLOO_SOCKET_IFNAME=lo on one machine, "
    "or the one that all machines share"
)


@dataclass(frozen=True, kw_only=True)
class SelftestOutcome:
    """What one rank saw of one collective: GB/s of the whole buffer, or what went wrong."""

    name: str
    gb_per_s: float = 0.0
    error: str = ""


def base(n: int, device: torch.device) -> Tensor:
    """[n] whole numbers below 251, so that sums of a few are exact."""
    return (torch.arange(n, device=device) % 251).float()


def _all_reduce(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    want = group.size * x + sum(range(group.size))
    return all_reduce(x + group.rank, group), want


def _all_gather(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    want = torch.cat([part + rank for rank, part in enumerate(x.chunk(group.size))])
    return all_gather(x.chunk(group.size)[group.rank] + group.rank, group), want


def _reduce_scatter(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    want = group.size * x.chunk(group.size)[group.rank] + sum(range(group.size))
    return reduce_scatter(x + group.rank, group), want


def _broadcast(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    return broadcast(x + group.rank, group, group.size - 1), x + (group.size - 1)


def _all_to_all(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    mine = x.chunk(group.size)[group.rank]
    return all_to_all(x + 1000 * group.rank, group), torch.cat([mine + 1000 * rank for rank in range(group.size)])


def _send_recv(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    mine = x + group.rank

    def received() -> Tensor:
        return irecv(tuple(x.shape), x.dtype, before, group, device=x.device, header=False).wait()

    if group.rank % 2:  # NCCL's messages between two ranks take turns: somebody has to receive first
        got = received()
        isend(mine, after, group, header=False).wait()
        return got, x + before
    sent = isend(mine, after, group, header=False)
    got = received()
    sent.wait()
    return got, x + before


COLLECTIVES: dict[str, Callable[[Tensor, Group], tuple[Tensor, Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send/recv": _send_recv,
}


def exercise(group: Group, device: torch.device, size: int = BYTES) -> Iterator[SelftestOutcome]:
    """Each collective of `COLLECTIVES`, in order; ends at the first that fails, as the ranks are apart then.

    Collective: every rank of the group takes every outcome. A wrong result keeps no rank from the next call.
    """
    x = base(size // 4 // group.size * group.size, device)
    for name, call in COLLECTIVES.items():
        try:
            error = _difference(*call(x[: 64 * group.size], group))  # connects, and finds what is plainly broken
            best = float("inf")
            for _ in range(3):
                barrier(group)
                begin = time.perf_counter()
                got, want = call(x, group)
                float(got[-1])  # an accelerator works on
                best = min(best, time.perf_counter() - begin)
            error = error or _difference(got, want)
        except (RuntimeError, ValueError) as problem:
            yield SelftestOutcome(name=name, error=_one_line(problem))
            return
        yield SelftestOutcome(name=name, error=error, gb_per_s=0.0 if error else x.nbytes / best / 1e9)


def _difference(got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape:
        return f"shape {list(got.shape)} instead of {list(want.shape)}"
    wrong = int((got != want).sum())
    return f"{wrong} of {want.numel()} numbers are wrong" if wrong else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@dataclass
class LocalWorld:
    """Forked processes that exercise the collectives over gloo; `outcomes()` waits for them, until `deadline`.

    Fork before this process starts threads of its own or touches an accelerator.
    """

    deadline: float
    directory: str
    pids: list[int] = field(default_factory=list)
    pipes: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, ranks: int = RANKS, deadline_s: float = DEADLINE_S) -> "LocalWorld":
        """Fork them; they begin at once."""
        world = cls(time.monotonic() + deadline_s, tempfile.mkdtemp(prefix="paracore-report-"))
        for rank in range(ranks):
            ours, theirs = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # numpy's idle threads, which stand a fork
                pid = os.fork()
            if pid == 0:
                _be(rank, ranks, world.directory, theirs)
            os.close(theirs)
            world.pids.append(pid)
            world.pipes.append(ours)
        return world

    def outcomes(self) -> list[list[SelftestOutcome]]:
        """By rank; a rank that died or did not answer has a last outcome that says so. The processes are gone."""
        texts = [bytearray() for _ in self.pipes]
        open_pipes = {pipe: text for pipe, text in zip(self.pipes, texts, strict=True)}
        while open_pipes and (left := self.deadline - time.monotonic()) > 0:
            for pipe in select.select(list(open_pipes), [], [], left)[0]:
                piece = os.read(pipe, 1 << 16)
                open_pipes[pipe].extend(piece)
                if not piece:
                    del open_pipes[pipe]
        late = [pipe in open_pipes for pipe in self.pipes]
        ends = [self._end(pid, kill) for pid, kill in zip(self.pids, late, strict=True)]
        for pipe in self.pipes:
            os.close(pipe)
        shutil.rmtree(self.directory, ignore_errors=True)
        return [_with_end(_parse(text), end) for text, end in zip(texts, ends, strict=True)]

    def _end(self, pid: int, kill: bool) -> str:
        """How a process ended, "" if well; killed first if it is late."""
        if kill:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if kill:
            return "did not answer in time"
        return "" if code == 0 else f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"


def _parse(text: bytes | bytearray) -> list[SelftestOutcome]:
    return [SelftestOutcome(**json.loads(line)) for line in text.decode().splitlines() if line.endswith("}")]


def _with_end(outcomes: list[SelftestOutcome], end: str) -> list[SelftestOutcome]:
    names = [name for name in COLLECTIVES if name not in {outcome.name for outcome in outcomes}]
    if not end or not names:
        return outcomes
    return [*outcomes, SelftestOutcome(name=names[0], error=f"the process {end}")]


def _be(rank: int, ranks: int, directory: str, pipe: int) -> None:
    """What a forked process does; it never returns."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # the parent alone talks
            os.dup2(null, stream)
        torch.set_num_threads(1)
        try:
            init_world("gloo", WAIT_S, init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
            group = world_group(WAIT_S)
            assert group is not None
        except (RuntimeError, ValueError) as error:
            _tell(pipe, SelftestOutcome(name=next(iter(COLLECTIVES)), error=_one_line(error)))
        else:
            for outcome in exercise(group, torch.device("cpu")):
                _tell(pipe, outcome)
            with suppress(RuntimeError):  # nobody hangs up on a slower one; the dead do not come
                barrier(group)
        code = 0
    finally:
        os._exit(code)


def _tell(pipe: int, outcome: SelftestOutcome) -> None:
    os.write(pipe, json.dumps(asdict(outcome)).encode() + b"\n")


def local_checks() -> list[Check]:
    """`LocalWorld` started and waited for, as checks."""
    try:
        told = LocalWorld.start().outcomes()
    except (OSError, AttributeError) as error:  # no more processes, no fork on this system, no room for a file
        value = f"could not start processes: {error}"
        return [Check(name="self-test", value=value, status="off", remedy="run it under torchrun instead")]
    return as_checks(told, f"gloo between {RANKS} processes")


def joined(device: torch.device, group: Group | None) -> list[SelftestOutcome]:
    """This rank's outcomes in a world that exists. Collective over it; none for a single process."""
    return list(exercise(group, device)) if group is not None else []


def as_checks(by_rank: Sequence[Sequence[SelftestOutcome]], where: str) -> list[Check]:
    """One check per collective: the slowest rank's rate, or the first thing that went wrong and on which rank."""
    found = []
    for name in COLLECTIVES:
        seen = {rank: outcome for rank, row in enumerate(by_rank) for outcome in row if outcome.name == name}
        errors = [f"rank {rank}: {outcome.error}" for rank, outcome in seen.items() if outcome.error]
        told = f"self-test {name}"
        if errors:
            value = "; ".join(sorted(errors, key=lambda error: "the process" not in error))
            found.append(Check(name=told, value=value, status="missing", remedy=REMEDY, required=True))
        elif len(seen) < len(by_rank):
            value = "not reached, because one before it failed"
            found.append(Check(name=told, value=value, status="missing", remedy=None, required=True))
        else:
            rate = min(outcome.gb_per_s for outcome in seen.values())
            found.append(Check(name=told, value=f"{rate:.2f} GB/s, {where}", status="ok"))
    return found
