"""Jobs on all cores: worker processes that die with their parent, results in the order of the jobs."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait

from core.datasets.corpus.documents import Encoded, Encoder, TextChunk

# jobs per worker that may wait for a slower one before them: bounds memory
_AHEAD = 4

Job = Sequence[TextChunk]


def encode_all(
    jobs: Iterable[Job], encoder: Encoder, workers: int
) -> Generator[tuple[Job, Encoded], None, None]:
    """Each job with its tokens, in the order of the jobs, computed by up to `workers` processes.

    One worker, or one job, needs no process. Close the iterator (`contextlib.closing`) to end the processes early.
    Raises `ValueError` if `workers` is not positive, `ChildProcessError` if a process died.
    """
    if workers < 1:
        raise ValueError(
            f"workers={workers} must be at least 1; this machine has {available_cores()} cores"
        )
    remaining = iter(jobs)
    first_two = list(islice(remaining, 2))
    remaining = chain(first_two, remaining)
    if workers == 1 or len(first_two) < 2:
        with _one_thread():
            for job in remaining:
                yield job, encoder.encode(job)
        return
    pool = _WorkerPool(encoder, workers)
    try:
        yield from pool.run(remaining)
    finally:
        pool.close()


def available_cores() -> int:
    """Cores this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tokenizers library would take every core for a batch."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


class _WorkerPool:
    """Processes that have one job at a time each, so that neither side can wait for the other to read."""

    def __init__(self, encoder: Encoder, workers: int) -> None:
        self._encoder = encoder
        self._workers = workers
        self._processes: dict[Connection, multiprocessing.process.BaseProcess] = {}
        # connection of a worker -> the number of its job
        self._busy: dict[Connection, int] = {}

    def run(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Encoded]]:
        """Each job with its tokens, in order; a few jobs are ahead of the next one that is yielded."""
        # all before the first job, which waits until its process can read
        for _ in range(self._workers):
            self._start()
        sent: dict[int, Job] = {}
        done: dict[int, Encoded] = {}
        number = written = 0
        job = next(jobs, None)
        while job is not None or sent:
            while (
                job is not None
                and number - written < _AHEAD * self._workers
                and (connection := self._idle_worker())
            ):
                self._send(connection, number, job)
                sent[number] = job
                # the next one is read while the workers work
                number = number + 1
                job = next(jobs, None)
            # a slow job holds back the results behind it; `_AHEAD` bounds how many
            while written in done:
                yield sent.pop(written), done.pop(written)
                written += 1
            if self._busy:
                for ready in wait(list(self._busy)):
                    assert isinstance(ready, Connection)
                    done[self._busy.pop(ready)] = self._receive(ready)

    def _idle_worker(self) -> Connection | None:
        return next(
            (connection for connection in self._processes if connection not in self._busy), None
        )

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        parent_end, worker_end = context.Pipe()
        process = context.Process(target=_work, args=(worker_end, self._encoder), daemon=True)
        # starting a process would start the tracker, which unblocks the signals that are blocked below
        resource_tracker.ensure_running()
        # Signals that go to the whole group are for the parent alone, which answers when it is done here: a process
        # that is half started would print a traceback of its own. The mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # the parent holds one end alone: when it dies, the worker reads the end of the pipe
        worker_end.close()
        self._processes[parent_end] = process

    def _send(self, connection: Connection, number: int, job: Job) -> None:
        self._busy[connection] = number
        try:
            connection.send(job)
        except OSError:
            self._raise_death(connection)

    def _receive(self, connection: Connection) -> Encoded:
        try:
            result = connection.recv()
        except (EOFError, OSError):
            self._raise_death(connection)
        if isinstance(result, str):
            raise RuntimeError(f"a worker process failed:\n{result}")
        return result

    def _raise_death(self, connection: Connection) -> None:
        process = self._processes[connection]
        process.join(timeout=5)
        raise ChildProcessError(
            f"a worker process of {self._workers} died with exit code {process.exitcode}, perhaps for lack of "
            "memory; use fewer --workers"
        )

    def close(self) -> None:
        """End all worker processes."""
        for process in self._processes.values():
            # they hold nothing that has to be finished
            process.kill()
        for connection, process in self._processes.items():
            process.join()
            connection.close()


def _work(connection: Connection, encoder: Encoder) -> None:
    """The life of a worker process: until the pipe ends."""
    # the processes are the parallelism
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        try:
            result: Encoded | str = encoder.encode(job)
        except Exception:
            result = traceback.format_exc()
        try:
            connection.send(result)
        except OSError:
            return
