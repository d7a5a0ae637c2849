"""The writer program: `python -m core.dist_checkpointing.writing.writer FD`. Writes what lies in a slab, and commits.

A program of its own and not a fork: no copy of the trainer's threads and device contexts, no second run of the user's
script. It imports no torch, lives in a session of its own (torchrun ends the trainer's), and
finishes the save it has begun when the trainer is gone; for other ranks it waits then as long as one of them beats.
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
LOG_BYTES = 1 << 20  # of its log, of which the last quarter stays then
GRACE_S = 2  # beyond the time limit of a job: it tells by itself which ranks are silent


class Warnings(logging.Handler):
    """What this program warns of: it goes into its log, and to the trainer with the answer."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning for the trainer, and write it into this program's log."""
        self._told.append(record.getMessage())
        _say(f"warning: {self._told[-1]}")

    def taken(self) -> list[str]:
        """All since the last time."""
        taken, self._told = self._told, []
        return taken


def main(fd: int) -> None:
    """Serve until the trainer closes the pipe, or is gone."""
    os.nice(NICENESS)
    warnings = Warnings()
    logging.getLogger().addHandler(warnings)
    slab = None
    for line in sys.stdin:
        told = json.loads(line)
        if slab is None or slab.size < told["bytes"]:
            slab = Slab(fd, told["bytes"])
        answer = _serve(told, slab)
        print(json.dumps(answer | {"warnings": warnings.taken()}), flush=True)


def _serve(told: dict[str, Any], slab: Slab) -> dict[str, Any]:
    job = Job(**told["job"])
    begin = time.perf_counter()
    signal.alarm(int(job.timeout_s) + GRACE_S)  # ends this program whatever hangs
    try:
        _say(f"{job.name}: {len(told['cells'])} cells")
        job.write(_cells(told["cells"], slab, job))
        written = time.perf_counter() - begin
        left = replace(job, timeout_s=max(0.0, job.timeout_s - written))
        left.conclude(lambda: os.getppid() != told["trainer"])
        _say(f"{job.name}: done after {time.perf_counter() - begin:.2f} s, of which {written:.2f} s to write")
        return {"uuid": job.uuid, "error": None, "seconds": time.perf_counter() - begin}
    except Orphaned as error:  # of a rank that waits for another one's commit nothing is in the way
        _say(f"{job.name}: {error}")
        if job.rank == 0:
            job.abandon()
        sys.exit(0)
    except Exception as error:
        _say(traceback.format_exc())
        with contextlib.suppress(OSError):  # a full disk, or a temporary that is gone
            job.fail(f"{type(error).__name__}: {error}")
        return {"uuid": job.uuid, "error": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - begin}
    finally:
        signal.alarm(0)


def _cells(cells: list[Any], slab: Slab, job: Job) -> Iterator[tuple[str, Index, Box, np.ndarray]]:
    for key, index, pairs, offset in cells:
        box: Box = tuple((start, stop) for start, stop in pairs)
        yield key, tuple(index), box, slab.array(offset, extent(box), job.metadata[key]["data_type"])


def _say(text: str) -> None:
    """Into the log file, which is this program's standard error."""
    with contextlib.suppress(OSError):  # a full disk
        _cut(sys.stderr.fileno())
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)


def _cut(log: int) -> None:
    """Of a log that is too long the end stays: a run of months saves often."""
    status = os.fstat(log)
    if stat.S_ISREG(status.st_mode) and status.st_size > LOG_BYTES:
        end = os.pread(log, LOG_BYTES // 4, status.st_size - LOG_BYTES // 4)
        os.ftruncate(log, 0)
        os.write(log, end[end.find(b"\n") + 1 :])


if __name__ == "__main__":
    main(int(sys.argv[1]))
