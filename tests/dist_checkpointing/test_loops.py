"""A process that saves and reads thousands of times: nothing is made anew each time that it did not have before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorstore as ts

from tests.dist_checkpointing import loops
from tests.marks import PRODUCT

ROOT = Path(__file__).parents[2]


def test_one_context_per_process(tmp_path, monkeypatch):
    """tensorstore's contexts, made and dropped by the thousand, have corrupted the heap."""

    def refused(*arguments):
        raise AssertionError("a context of its own")

    monkeypatch.setattr(ts, "Context", refused)
    loops.rounds(tmp_path, 2)


def started(folder, count):
    """A process of its own, whose allocator checks what is freed (glibc has that apart since 2.34)."""
    folder.mkdir()
    checks = {"MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}
    command = [sys.executable, "-m", "tests.dist_checkpointing.loops", str(folder), str(count)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | checks, stdout=-1, stderr=-2, text=True)


@pytest.mark.parametrize(
    ("processes", "count"),
    [(1, 60), pytest.param(4, 300, marks=pytest.mark.full), pytest.param(4, 1250, marks=PRODUCT)],
)
def test_thousands_of_times(tmp_path, processes, count):
    running = [started(tmp_path / str(i), count) for i in range(processes)]
    for process in running:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
