"""The trainer's side of an asynchronous save: a warm slab, the writer program, and what became of each save."""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from core.dist_checkpointing.planning.exchange import Cells
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.storage.checkpoint_dir import PosixCheckpointDir
from core.dist_checkpointing.writing.job import Job
from core.dist_checkpointing.writing.slab import Slab, aligned

log = logging.getLogger(__name__)

# after its own time limit, how long the writer may take to die
MARGIN_S = 5.0


@dataclass
class SaveStats:
    """What a save cost the training loop, in milliseconds, and what it wrote from this rank.

    stall_ms: latency of the call, between the call and its return; exchange_ms: of that, planning and the transfers
    between ranks. seconds: from the call to the commit, once it is known.
    """

    stall_ms: float = 0.0
    exchange_ms: float = 0.0
    bytes: int = 0
    seconds: float | None = None


class WriterProgram:
    """One writer program and its slab; started once, again after it died."""

    def __init__(self, log: str | None) -> None:
        self._log = log
        self._slab = Slab()
        # [key, index, box, offset in the slab] of each
        self._copied_cells: list[list[Any]] = []
        self._used = 0  # bytes of the slab
        self._process: subprocess.Popen[bytes] | None = None
        self._job: Job | None = None
        self._begin_time = 0.0

    def start(self, size: int) -> None:
        """Warm up: an empty slab of `size` bytes, every page touched, and the program running."""
        self._slab.reserve(size)
        self._copied_cells = []
        self._used = 0
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        with open(self._log or os.devnull, "a+b") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "core.dist_checkpointing.writing.writer",
                    str(self._slab.fd),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[self._slab.fd],
                start_new_session=True,  # torchrun ends the trainer's session, the save goes on
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )

    def copy(self, cells: Cells) -> None:
        """Copy cells into the slab, behind those that are there; `start` made room."""
        for key, index, box, array in cells:
            # the stall of a save is mostly this copy; a cell may be a strided view of a parameter
            np.copyto(self._slab.array(self._used, array.shape, array.dtype.str), array)
            self._copied_cells.append([key, index, box, self._used])
            self._used = aligned(self._used + array.nbytes)

    def begin(self, job: Job) -> None:
        """Hand over the cells that were copied; returns at once."""
        assert self._process is not None and self._process.stdin is not None
        request = {
            "job": asdict(job),
            "cells": self._copied_cells,
            "bytes": self._slab.size,
            "trainer": os.getpid(),
        }
        line = json.dumps(request)
        self._job = job
        self._begin_time = time.monotonic()
        # the program is dead: `wait` reports it
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def wait(self, timeout_s: float | None = None) -> tuple[str | None, float]:
        """(error, None if it committed; seconds since `begin`). TimeoutError: it has not ended after `timeout_s`.

        Without a timeout: the job's own, after which the writer is dead anyhow.
        """
        assert (
            self._job is not None and self._process is not None and self._process.stdout is not None
        )
        limit_s = timeout_s
        if limit_s is None:
            limit_s = self._job.timeout_s + MARGIN_S - (time.monotonic() - self._begin_time)
        # the writer answers with one line; a pipe that ends without one means that it died
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, limit_s))
        if not ready:
            if timeout_s is not None:
                raise TimeoutError(f"{self._job.name} is not written after {timeout_s:.0f} s")
            self._process.kill()
        line = self._process.stdout.readline()
        if not line:
            exit_status = _describe_exit(self._process.wait())
            error = f"the writer program ended {exit_status}; its log: {self._log}"
        else:
            answer = json.loads(line)
            error = answer["error"]
            for warning in answer["warnings"]:
                log.warning("%s", warning)
        return error, time.monotonic() - self._begin_time

    def close(self) -> None:
        """Let the program end after the save under way."""
        self._end()
        self._slab.close()

    def _end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            # what a dead program did not read
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
            self._process = None


def _describe_exit(status: int) -> str:
    """How a program ended, for a message; a negative status is the number of a signal."""
    if status == -signal.SIGALRM:
        return "at its time limit"
    if status >= 0:
        return f"with status {status}"
    return f"by {signal.Signals(-status).name}"


class BackgroundCall:
    """A call in a thread, or at once; `wait` raises what it raised."""

    def __init__(self, call: Callable[[], None], *, threaded: bool) -> None:
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
            self._thread.start()
        else:
            self._run(call)

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Block until it is done."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


def log_file(root: str, rank: int) -> str | None:
    """The log file of a rank's writer program; None beside an object store."""
    directory = CheckpointRoot(root).files
    if not isinstance(directory, PosixCheckpointDir):
        return None
    folder = os.path.join(directory.path, ".logs")
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, f"writer-{rank:05d}.log")
