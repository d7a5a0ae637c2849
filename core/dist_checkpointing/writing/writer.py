"""The writer program: `python -m core.dist_checkpointing.writing.writer FD`. Writes what lies in a slab, and commits.

A program of its own and not a fork: no copy of the trainer's threads and device contexts, no second run of the user's
script. It imports no torch, lives in a session of its own (torchrun ends the trainer's), and finishes the save it has
begun when the trainer is gone; for other ranks it waits then as long as one of them beats.
One job per line of standard input, one answer per line of standard output; the end of the input ends it.
"""

import contextlib
import json
import logging
import os
import signal
import stat
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from core.dist_checkpointing.format.arrays import Index
from core.dist_checkpointing.publish.lock import Orphaned
from core.dist_checkpointing.writing.job import Job
from core.dist_checkpointing.writing.slab import Slab
from core.parallel_state.flat import Box, extent

NICENESS = 10  # the training step beside it goes first
MAX_LOG_BYTES = 1 << 20  # a longer log is cut to its last quarter
# beyond the time limit of a job, which reports by itself which ranks are silent
GRACE_S = 2


class WarningRecorder(logging.Handler):
    """Collects this program's warnings: they go into its log, and to the trainer with the answer."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning for the trainer, and write it into this program's log."""
        message = record.getMessage()
        self._messages.append(message)
        _log(f"warning: {message}")

    def take(self) -> list[str]:
        """All messages since the last call."""
        messages = self._messages
        self._messages = []
        return messages


def main(fd: int) -> None:
    """Serve until the trainer closes the pipe, or is gone."""
    # checksums and copies would else take the cores of the training step
    os.nice(NICENESS)
    warnings = WarningRecorder()
    logging.getLogger().addHandler(warnings)
    slab = None
    for line in sys.stdin:
        request = json.loads(line)
        # the trainer may have grown it since the last job
        if slab is None or slab.size < request["bytes"]:
            slab = Slab(fd, request["bytes"])
        answer = _serve(request, slab)
        print(json.dumps(answer | {"warnings": warnings.take()}), flush=True)


def _serve(request: dict[str, Any], slab: Slab) -> dict[str, Any]:
    """Write and commit one job. Returns uuid, error (None: committed) and seconds."""
    job = Job(**request["job"])
    begin = time.perf_counter()
    # ends this program whatever hangs
    signal.alarm(int(job.timeout_s) + GRACE_S)
    error_text = None
    try:
        _log(f"{job.name}: {len(request['cells'])} cells")
        job.write(_cells(request["cells"], slab, job))
        write_seconds = time.perf_counter() - begin
        # writing and committing share one time limit
        commit_job = replace(job, timeout_s=max(0.0, job.timeout_s - write_seconds))
        commit_job.conclude(lambda: os.getppid() != request["trainer"])
        seconds = time.perf_counter() - begin
        _log(f"{job.name}: done after {seconds:.2f} s, of which {write_seconds:.2f} s to write")
    except Orphaned as error:
        # the trainer is gone, and no other rank goes on. Rank 0 removes the attempt; the others only wait for its
        # commit, and nothing of theirs is in the way of a later save
        _log(f"{job.name}: {error}")
        if job.rank == 0:
            job.abandon()
        sys.exit(0)
    except Exception as error:
        _log(traceback.format_exc())
        error_text = f"{type(error).__name__}: {error}"
        # a full disk, or a temporary that is gone
        with contextlib.suppress(OSError):
            job.fail(error_text)
    finally:
        signal.alarm(0)
    return {"uuid": job.uuid, "error": error_text, "seconds": time.perf_counter() - begin}


def _cells(cells: list[Any], slab: Slab, job: Job) -> Iterator[tuple[str, Index, Box, np.ndarray]]:
    """The cells of a request, as views of the slab."""
    for key, index, intervals, offset in cells:
        box: Box = tuple((start, stop) for start, stop in intervals)
        data_type = job.metadata[key]["data_type"]
        yield key, tuple(index), box, slab.array(offset, extent(box), data_type)


def _log(text: str) -> None:
    """Into the log file, which is this program's standard error."""
    with contextlib.suppress(OSError):  # a full disk
        _shorten(sys.stderr.fileno())
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)


def _shorten(log: int) -> None:
    """Of a log that is too long the end stays: a run of months saves often."""
    status = os.fstat(log)
    if stat.S_ISREG(status.st_mode) and status.st_size > MAX_LOG_BYTES:
        end = os.pread(log, MAX_LOG_BYTES // 4, status.st_size - MAX_LOG_BYTES // 4)
        os.ftruncate(log, 0)
        # from the first full line
        os.write(log, end[end.find(b"\n") + 1 :])


if __name__ == "__main__":
    main(int(sys.argv[1]))
