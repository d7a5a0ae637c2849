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
MESSAGE_BYTES = 4 << 20  # of the message whose rate is measured
WAIT_S = 4.0  # for one message
DEADLINE_S = 8.0  # for everything
REMEDY = (
    "processes of this machine cannot talk: name the network interface, export GLOO_SOCKET_IFNAME=lo on one machine, "
    "or the one that all machines share"
)


@dataclass(frozen=True, kw_only=True)
class SelftestOutcome:
    """One collective on one rank: GB/s of the whole buffer, or what went wrong."""

    name: str
    gb_per_s: float = 0.0
    error: str = ""


def base(count: int, device: torch.device) -> Tensor:
    """[count] whole numbers below 251, so that sums of a few are exact."""
    return (torch.arange(count, device=device) % 251).float()


# Each collective: (result, expected result) for an input x [n] that is the same on all ranks


def _all_reduce(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    expected = group.size * x + sum(range(group.size))
    return all_reduce(x + group.rank, group), expected


def _all_gather(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    shards = x.chunk(group.size)
    expected = torch.cat([shard + rank for rank, shard in enumerate(shards)])
    return all_gather(shards[group.rank] + group.rank, group), expected


def _reduce_scatter(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    shard = x.chunk(group.size)[group.rank]
    expected = group.size * shard + sum(range(group.size))
    return reduce_scatter(x + group.rank, group), expected


def _broadcast(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    source = group.size - 1
    return broadcast(x + group.rank, group, source), x + source


def _all_to_all(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    shard = x.chunk(group.size)[group.rank]
    expected = torch.cat([shard + 1000 * rank for rank in range(group.size)])
    return all_to_all(x + 1000 * group.rank, group), expected


def _send_recv(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    # around a ring: to the next rank, from the previous one
    destination = (group.rank + 1) % group.size
    source = (group.rank - 1) % group.size
    message = x + group.rank

    def receive() -> Tensor:
        return irecv(tuple(x.shape), x.dtype, source, group, device=x.device, header=False).wait()

    # NCCL's messages between two ranks take turns: if all sent first, they would deadlock
    if group.rank % 2:
        received = receive()
        isend(message, destination, group, header=False).wait()
        return received, x + source
    sent = isend(message, destination, group, header=False)
    received = receive()
    sent.wait()
    return received, x + source


COLLECTIVES: dict[str, Callable[[Tensor, Group], tuple[Tensor, Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send/recv": _send_recv,
}


def exercise(
    group: Group, device: torch.device, size: int = MESSAGE_BYTES
) -> Iterator[SelftestOutcome]:
    """Each collective of `COLLECTIVES`, in order; ends at the first that fails, as ranks are out of step then.

    Collective: every rank of the group takes every outcome. After a wrong result all ranks still make the next call.
    """
    # float32, and as many for every rank
    x = base(size // 4 // group.size * group.size, device)
    for name, call in COLLECTIVES.items():
        try:
            # a small one first: it connects, and finds what is plainly broken
            error = _difference(*call(x[: 64 * group.size], group))
            shortest = float("inf")
            for _ in range(3):
                barrier(group)
                begin = time.perf_counter()
                result, expected = call(x, group)
                float(result[-1])  # waits for an accelerator
                shortest = min(shortest, time.perf_counter() - begin)
            error = error or _difference(result, expected)
        except (RuntimeError, ValueError) as problem:
            yield SelftestOutcome(name=name, error=_one_line(problem))
            return
        rate = 0.0 if error else x.nbytes / shortest / 1e9
        yield SelftestOutcome(name=name, error=error, gb_per_s=rate)


def _difference(result: Tensor, expected: Tensor) -> str:
    if result.shape != expected.shape:
        return f"shape {list(result.shape)} instead of {list(expected.shape)}"
    wrong = int((result != expected).sum())
    if wrong:
        return f"{wrong} of {expected.numel()} numbers are wrong"
    return ""


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
            # a pipe per rank: its end tells that the process has ended, however it did
            read_end, write_end = os.pipe()
            with warnings.catch_warnings():
                # Python warns of a fork beside threads: numpy's are idle, a fork does not harm them
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _run_rank(rank, ranks, world.directory, write_end)
            os.close(write_end)
            world.pids.append(pid)
            world.pipes.append(read_end)
        return world

    def outcomes(self) -> list[list[SelftestOutcome]]:
        """By rank; a rank that died or did not answer has a last outcome that says so. The processes are gone."""
        texts = {pipe: bytearray() for pipe in self.pipes}
        open_pipes = set(self.pipes)
        remaining = self.deadline - time.monotonic()
        while open_pipes and remaining > 0:
            readable, _, _ = select.select(list(open_pipes), [], [], remaining)
            for pipe in readable:
                received = os.read(pipe, 1 << 16)
                texts[pipe].extend(received)
                if not received:  # the process has closed its end
                    open_pipes.remove(pipe)
            remaining = self.deadline - time.monotonic()
        endings = [
            self._end(pid, kill=pipe in open_pipes)
            for pid, pipe in zip(self.pids, self.pipes, strict=True)
        ]
        # nothing is left behind: neither processes nor files
        for pipe in self.pipes:
            os.close(pipe)
        shutil.rmtree(self.directory, ignore_errors=True)
        return [
            _add_ending(_parse(texts[pipe]), end)
            for pipe, end in zip(self.pipes, endings, strict=True)
        ]

    def _end(self, pid: int, *, kill: bool) -> str:
        """Wait for a process, killed first if it is late; how it ended, "" if well."""
        if kill:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if kill:
            return "did not answer in time"
        if code < 0:
            return f"ended with signal {-code}"
        if code:
            return f"ended with exit code {code}"
        return ""


def _parse(text: bytes | bytearray) -> list[SelftestOutcome]:
    complete_lines = [line for line in text.decode().splitlines() if line.endswith("}")]
    return [SelftestOutcome(**json.loads(line)) for line in complete_lines]


def _add_ending(outcomes: list[SelftestOutcome], ending: str) -> list[SelftestOutcome]:
    """A process that died or was late failed in the collective after its last outcome."""
    done = {outcome.name for outcome in outcomes}
    # outcomes come in the order of COLLECTIVES: the first that is missing was under way
    missing = [name for name in COLLECTIVES if name not in done]
    if not ending or not missing:
        return outcomes
    return [*outcomes, SelftestOutcome(name=missing[0], error=f"the process {ending}")]


def _run_rank(rank: int, ranks: int, directory: str, pipe: int) -> None:
    """The body of a forked process: writes outcomes into the pipe, and exits without returning."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # only the parent prints
            os.dup2(null, stream)
        # one thread per rank: two ranks on few cores would wait for each other
        torch.set_num_threads(1)
        try:
            init_world(
                "gloo", WAIT_S, init_method=f"file://{directory}/store", rank=rank, world_size=ranks
            )
            group = world_group(WAIT_S)
            assert group is not None
        except (RuntimeError, ValueError) as error:
            _write_outcome(
                pipe, SelftestOutcome(name=next(iter(COLLECTIVES)), error=_one_line(error))
            )
        else:
            for outcome in exercise(group, torch.device("cpu")):
                _write_outcome(pipe, outcome)
            # a rank that left early would break a slower one's connection
            with suppress(RuntimeError):
                barrier(group)
        code = 0
    finally:
        # without the parent's exit handlers, which a fork would run twice
        os._exit(code)


def _write_outcome(pipe: int, outcome: SelftestOutcome) -> None:
    os.write(pipe, json.dumps(asdict(outcome)).encode() + b"\n")


def local_checks() -> list[Check]:
    """Run the self-test between forked processes of this machine."""
    try:
        outcomes_per_rank = LocalWorld.start().outcomes()
    except (OSError, AttributeError) as error:
        # no more processes, no fork on this system, no room for a file
        value = f"could not start processes: {error}"
        return [
            Check(
                name="self-test", value=value, status="off", remedy="run it under torchrun instead"
            )
        ]
    return as_checks(outcomes_per_rank, f"gloo between {RANKS} processes")


def joined(device: torch.device, group: Group | None) -> list[SelftestOutcome]:
    """This rank's outcomes in a world that exists. Collective over it; none for a single process."""
    if group is not None:
        return list(exercise(group, device))
    return []


def as_checks(
    outcomes_per_rank: Sequence[Sequence[SelftestOutcome]], participants: str
) -> list[Check]:
    """One check per collective: the slowest rank's rate, or the first thing that went wrong and on which rank."""
    checks = []
    for name in COLLECTIVES:
        outcomes = {}  # by rank
        for rank, rank_outcomes in enumerate(outcomes_per_rank):
            for outcome in rank_outcomes:
                if outcome.name == name:
                    outcomes[rank] = outcome
        errors = [
            f"rank {rank}: {outcome.error}" for rank, outcome in outcomes.items() if outcome.error
        ]
        title = f"self-test {name}"
        if errors:
            # a process that died is the cause, what the others say about their connections the consequence
            value = "; ".join(sorted(errors, key=lambda error: "the process" not in error))
            checks.append(
                Check(name=title, value=value, status="missing", remedy=REMEDY, required=True)
            )
        elif len(outcomes) < len(outcomes_per_rank):
            value = "not reached, because one before it failed"
            checks.append(
                Check(name=title, value=value, status="missing", remedy=None, required=True)
            )
        else:
            rate = min(outcome.gb_per_s for outcome in outcomes.values())
            checks.append(Check(name=title, value=f"{rate:.2f} GB/s, {participants}", status="ok"))
    return checks
