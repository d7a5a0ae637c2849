"""Four processes that may fail: each case has a world of its own, and whoever is lost is replaced."""

import multiprocessing as mp
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

SIZE = 4
ROOT = str(Path(__file__).parents[2])


def _work(rank, port, pipe):
    """Receive (number, module, index of a case, port of rank 0's store or None), answer (seconds, Seen)."""
    sys.path.insert(0, ROOT)
    import importlib

    import torch
    import torch.distributed as dist

    from tests.zoo.case import Seen, observe

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    while True:
        try:
            number, module, index, own = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        case = importlib.import_module(module).FAMILY.cases[index]
        limit = timedelta(seconds=case.timeout_s)
        here = dist.TCPStore("127.0.0.1", own, is_master=rank == 0, timeout=timedelta(seconds=30)) if own else store
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(number), here), rank=rank, world_size=SIZE, timeout=limit
        )
        del here
        begin = time.monotonic()
        try:
            seen = observe(case.run, case)
        except BaseException as error:  # an interrupt, which is nobody's to turn into something else
            seen = Seen("refused", f"{type(error).__name__}: {error}")
        answer = time.monotonic() - begin, seen
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(answer)


class Crew:
    """`crew(case)` runs it on four ranks: rank -> (seconds, what it saw) of those that are not to be lost."""

    def __init__(self):
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
        self._members, self._number = {}, 0

    def _start(self, rank):
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(rank, self._store.port, theirs), daemon=True)
        process.start()
        theirs.close()
        self._members[rank] = process, ours

    def end(self, rank):
        """Stop one, whatever it does."""
        process, pipe = self._members.pop(rank)
        pipe.close()
        process.kill()
        process.join()

    def close(self):
        for rank in list(self._members):
            self.end(rank)

    def __call__(self, module, index, case):
        import socket

        for rank in set(range(SIZE)) - set(self._members):
            self._start(rank)
        own = None
        if case.rank_0_keeps_the_store:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                own = s.getsockname()[1]
        self._number += 1
        for _, pipe in self._members.values():
            pipe.send((self._number, module, index, own))
        waiting = {pipe: rank for rank, (_, pipe) in self._members.items() if rank not in case.lost}
        answers, end = {}, time.monotonic() + 3 * case.timeout_s + 30
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    answers[rank] = None
        for rank in range(SIZE):
            if answers.get(rank) is None:
                self.end(rank)
        return answers
