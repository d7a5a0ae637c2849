"""Four worker processes that start once; tests send them functions and get results back in milliseconds.

A job runs on the first `world` workers. Each world size has its own default process group (a PrefixStore
over one TCPStore), made at its first use and kept, so no test pays for a rendezvous twice.

Every job has a number, which its answers repeat: no answer can be taken for that of another job.
"""

import gc
import multiprocessing as mp
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

SIZE = 4
TIMEOUT_S = 120.0  # one job; a hang kills the pool and names the ranks that did not answer
GRACE_S = 3.0  # after one rank failed, how long the others may take to say why
ROOT = str(Path(__file__).parents[1])
# imported once instead of once per worker (torch.optim imports torch._dynamo at its first use)
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "tests.preloaded"]


class RankError(AssertionError):
    """A job failed; the message starts with `rank r of n`."""


def _switch_world(rank: int, world: int, store: Any, groups: dict[int, Any]) -> None:
    """Make the default process group one of `world` ranks, creating it at first use.

    torch names groups by a counter; ranks belong to different worlds, so each world counts for itself.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if current := dist.group.WORLD:
        groups[current.size()] = (current, c10d._world.group_count)
    group, c10d._world.group_count = groups.get(world, (None, 1000 * world))
    c10d._update_default_pg(group)
    if group is not None:
        return
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"world{world}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S / 2),
    )


def _work(rank: int, port: int, pipe: Connection) -> None:
    """One worker: receive (number, job), answer (number, error or None, result)."""
    sys.path.insert(0, ROOT)
    import torch
    import torch.distributed as dist

    gc.freeze()  # what the fork server imported is no garbage
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    groups: dict[int, Any] = {}
    while True:
        try:
            number, job = pipe.recv()
        except (EOFError, OSError):
            return
        error, result = None, None
        try:
            world, fn, args, kwargs = pickle.loads(job)
            _switch_world(rank, world, store, groups)
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float64)  # split and whole differ by rounding only
            result = fn(*args, **kwargs)
        except BaseException:
            error = traceback.format_exc()
        torch.set_default_dtype(torch.float32)
        try:
            pipe.send((number, error, result))
        except (BrokenPipeError, ConnectionResetError):  # the pool was closed meanwhile
            return
        except BaseException:
            pipe.send((number, traceback.format_exc(), None))


class Pool:
    """`pool(fn, world=n, **kwargs)` runs `fn` on n ranks and returns their results in rank order."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None
        self._number = 0

    def _start(self) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        """Stop the workers; the next call starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes, self._store = [], [], None

    def __call__(self, fn: Callable, *args: Any, world: int = 2, timeout: float = TIMEOUT_S, **kwargs: Any) -> list:
        # each its own pickle (a tensor in shared memory can be received once), and all before anything is sent
        jobs = [bytes(ForkingPickler.dumps((world, fn, args, kwargs))) for _ in range(world)]
        try:
            if not self._processes:
                self._start()
            answers = self._ask(jobs, timeout)
        except BaseException:  # an interrupt, say: some workers have the job, or answers that nobody reads
            self.close()
            raise
        errors = {rank: error for rank, (error, _) in sorted(answers.items()) if error}
        silent = [rank for rank in range(world) if rank not in answers]
        if silent or any("the process died" in error for error in errors.values()):
            self.close()
        if errors or silent:
            lines = [f"rank {rank} of {world}: {error}" for rank, error in errors.items()]
            lines += [f"rank {rank} of {world}: no answer" for rank in silent]
            raise RankError("\n".join(lines))
        return [answers[rank][1] for rank in range(world)]

    def _ask(self, jobs: list[bytes], timeout: float) -> dict[int, tuple[str | None, Any]]:
        """rank -> (error, result) of the ranks that answered in time."""
        self._number += 1
        world = len(jobs)
        if dead := [rank for rank in range(world) if not self._processes[rank].is_alive()]:
            raise RankError("\n".join(f"rank {r} of {world}: {self._died(r)[0]}, before this job" for r in dead))
        for pipe, job in zip(self._pipes, jobs, strict=False):
            pipe.send((self._number, job))
        answers, deadline = {}, time.monotonic() + timeout
        while len(answers) < world and (left := deadline - time.monotonic()) > 0:
            waiting = {self._pipes[r]: r for r in range(world) if r not in answers}
            for pipe in wait(list(waiting), left):
                rank = waiting[pipe]
                try:
                    number, *answer = pipe.recv()
                except (EOFError, OSError):
                    number, answer = self._number, self._died(rank)
                if number != self._number:  # of a job that was given up
                    continue
                answers[rank] = tuple(answer)
                if answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _died(self, rank: int) -> tuple[str, None]:
        self._processes[rank].join(1)
        return f"the process died, exit code {self._processes[rank].exitcode}", None
