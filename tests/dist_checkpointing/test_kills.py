"""Real kill -9 at random moments. What is found then is whole, the old state or the new, and the next job goes on."""

import multiprocessing as mp
import os
import random
import re
import signal
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.dist_checkpointing import victims
from tests.dist_checkpointing.aftermath import assert_goes_on, leftovers, newest

STALE_S = 4.0  # what a writer that lives stays below
WAIT_S = 30.0


class Job:
    """One job of victims: its processes, and what each of them has told so far."""

    def __init__(self, victim, world, folder, **arguments):
        context = mp.get_context("forkserver")  # the pool's, which has torch: a job starts in milliseconds
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
        self.root, self.processes, self.pipes = folder / "root", [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            self.processes.append(
                context.Process(
                    target=victims.run, args=(victim, theirs, rank, world, folder), kwargs=arguments, daemon=True
                )
            )
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)
        self.told = [defaultdict(list) for _ in range(world)]

    def listen(self, rank, timeout_s=0.0):
        """Takes what one rank has told; False at the end of it."""
        try:
            while self.pipes[rank].poll(timeout_s):
                kind, value = self.pipes[rank].recv()
                self.told[rank][kind].append(value)
                timeout_s = 0.0
        except (EOFError, ConnectionResetError):
            return False
        return True

    def until(self, kind, at_least, rank=0):
        """Until a rank has told of that number, and none has failed."""
        end = time.monotonic() + WAIT_S
        while not [value for value in self.told[rank][kind] if value >= at_least]:
            assert self.listen(rank, 0.1) and not self.told[rank]["raised"], self.told[rank]
            assert time.monotonic() < end, self.told[rank]

    def kill(self, *ranks):
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGKILL)

    def stop_when(self, holds, rank=0):
        """Stops a rank at a moment at which that holds, however fast the machine is."""
        pid, end = self.processes[rank].pid, time.monotonic() + WAIT_S
        while stop(pid) or not holds():
            assert self.listen(rank) and not self.told[rank]["raised"] and time.monotonic() < end, self.told[rank]
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.0005)

    def ended(self, timeout_s=WAIT_S):
        """All have, by themselves or not; what they told is heard to the end. How long that took."""
        begin = time.monotonic()
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, begin + timeout_s - time.monotonic()))
            assert not process.is_alive(), f"rank {rank} hangs: {self.told[rank]}"
            while self.listen(rank):
                pass
        return time.monotonic() - begin

    def writers(self):
        return sorted({pid for told in self.told for pid in told["writer"]})

    def possible(self):
        """The numbers of the states that may be the newest: the last that some rank knew of, or one begun since."""
        saved = max((seed for told in self.told for seed in told["saved"]), default=0)
        return range(saved, max(seed for told in self.told for seed in told["begins"]) + 1)


@contextmanager
def job(victim, world, folder, **arguments):
    folder.mkdir()
    made = Job(victim, world, folder, **arguments)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
        for pid in made.writers():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid):
    """A program that has ended may still be listed until its new parent looks."""
    try:
        return status(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def status(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    while status(pid) not in "TZ":
        pass


def gone(pids):
    end = time.monotonic() + WAIT_S
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.02)


def rounds(name, number):
    """Number and random generator of each kill: the same every time, though the processes' speed is not."""
    return [(n, random.Random(f"{name} {n}")) for n in range(number)]


@pytest.mark.parametrize(
    "world, who, kills", [(1, "all", 1), *(pytest.param(2, who, 6, marks=pytest.mark.full) for who in ("all", "one"))]
)
def test_killed_while_saving(world, who, kills, tmp_path, single):
    """A rank that is left alone says so, as soon as the other is gone."""
    found = set()
    for number, dice in rounds(f"{world} {who}", kills):
        with job(victims.saving, world, tmp_path / str(number), replaces=bool(number % 2)) as victim:
            victim.until("saved", 2)
            time.sleep(dice.uniform(0, 0.3))
            killed = range(world) if who == "all" else [dice.randrange(world)]
            victim.kill(*killed)
            assert victim.ended(victims.TIMEOUT_S + 5) < victims.TIMEOUT_S + 2
            for rank in set(range(world)) - set(killed):
                assert re.search(r"Connection (closed|reset) by peer", victim.told[rank]["raised"][0])
            found |= leftovers(victim.root)
            assert newest(victim.root, single)[1] in victim.possible()
            assert_goes_on(victim.root, single, beside=True)
    assert found or (world, who) != (2, "all")  # some in the middle of a save; a survivor tidies up


@pytest.mark.full
def test_a_rank_that_is_silent_while_saving(tmp_path, single):
    """It does not answer, though its connections are open: the other waits as long as it was told to."""
    with job(victims.saving, 2, tmp_path / "job") as victim:
        victim.until("saved", 2)
        os.kill(victim.processes[1].pid, signal.SIGSTOP)
        victim.processes[0].join(victims.TIMEOUT_S + 5)
        assert not victim.processes[0].is_alive()
        victim.kill(1)
        victim.ended()
        assert f"{victims.TIMEOUT_S * 1000:.0f}ms" in victim.told[0]["raised"][0]
        assert newest(victim.root, single)[1] in victim.possible()
        assert_goes_on(victim.root, single, beside=True)


@pytest.mark.full
def test_trainers_killed_beside_their_writers(tmp_path, single):
    """What every rank has handed over is committed; nothing is left running."""
    for number, dice in rounds("trainers", 5):
        with job(victims.saving_beside, 2, tmp_path / str(number), replaces=bool(number % 2)) as victim:
            victim.until("saved", 2)
            time.sleep(dice.uniform(0, 0.3))
            victim.kill(0, 1)
            victim.ended()
            seed = newest(victim.root, single, STALE_S)[1]
            assert seed in victim.possible()
            assert seed >= min(told["handed"][-1] for told in victim.told)
            gone(victim.writers())
            assert_goes_on(victim.root, single, beside=True)


@pytest.mark.full
def test_one_trainer_killed_beside_its_writer(tmp_path, single):
    """Its writer goes on, that of the other too; the other trainer says so."""
    for number, dice in rounds("trainer", 4):
        with job(victims.saving_beside, 2, tmp_path / str(number)) as victim:
            victim.until("saved", 2)
            time.sleep(dice.uniform(0, 0.3))
            victim.kill(number % 2)
            assert victim.ended(victims.TIMEOUT_S + 20) < victims.TIMEOUT_S + 8
            seed = newest(victim.root, single, STALE_S)[1]
            assert seed in victim.possible()
            assert victim.told[1 - number % 2]["raised"]
            gone(victim.writers())
            assert_goes_on(victim.root, single, beside=True)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_writers_killed_beside_their_trainers(world, tmp_path, single):
    """The trainers hear of it and go on with a new writer."""
    failed = ""
    for number, dice in rounds(f"writers {world}", 3):
        with job(victims.saving_beside, world, tmp_path / str(number), replaces=bool(number % 2)) as victim:
            rank = dice.randrange(world)
            victim.until("writer", 1, rank)
            victim.until("handed", dice.randrange(3, 9), rank)
            time.sleep(dice.uniform(0, 0.03))
            os.kill(victim.told[rank]["writer"][-1], signal.SIGKILL)
            victim.until("saved", victim.told[rank]["begins"][-1] + 3, rank)
            victim.kill(*range(world))
            victim.ended()
            failed += "".join(victim.told[rank]["failed"])
            assert newest(victim.root, single, STALE_S)[1] in victim.possible()
            gone(victim.writers())
            assert_goes_on(victim.root, single, beside=True)
    assert "SIGKILL" in failed  # but not for one that had nothing to do


@pytest.mark.full
def test_writer_and_trainer_killed_together(tmp_path, single):
    found = set()
    for number, dice in rounds("both", 4):
        with job(victims.saving_beside, 1, tmp_path / str(number)) as victim:
            victim.until("writer", 1)
            victim.until("handed", dice.randrange(3, 9))
            time.sleep(dice.uniform(0, 0.03))
            victim.kill(0)
            os.kill(victim.told[0]["writer"][-1], signal.SIGKILL)
            victim.ended()
            gone(victim.writers())
            found |= leftovers(victim.root)
            assert newest(victim.root, single)[1] in victim.possible()
            assert_goes_on(victim.root, single, beside=True)
    assert found


@pytest.mark.full
def test_killed_while_removing_old_steps(tmp_path, single):
    found = set()
    for number, dice in rounds("retention", 5):
        with job(victims.retaining, 1, tmp_path / str(number)) as victim:
            victim.until("retains", 4 * (1 + number % 2))
            if number:
                time.sleep(dice.uniform(0.002, 0.02))
            else:
                victim.stop_when(lambda: ".trash" in leftovers(victim.root))
            victim.kill(0)
            victim.ended()
            found |= leftovers(victim.root)
            assert newest(victim.root, single)[1] in victim.possible()
            assert_goes_on(victim.root, single, beside=True)
    assert ".trash" in found
