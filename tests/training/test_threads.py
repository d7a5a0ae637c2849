"""At the end of a run no thread is left that could meet the end of the interpreter: that ended a rank by SIGABRT."""

import os
import subprocess
import sys

import pytest

from tests.examples.test_pretrain import TINY
from tests.training.tiny import prepared

PROGRAM = """
import glob, sys, threading
from core.pretrain import main

main(sys.argv[1:])
names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
print("left:", [name for name in names if "gloo" in name], [t.name for t in threading.enumerate()], flush=True)
"""


@pytest.mark.full
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads have names under /proc only")
def test_a_run_leaves_no_thread_of_gloo_nor_of_ours(tmp_path):
    made = prepared(tmp_path)
    (tmp_path / "run.py").write_text(PROGRAM)
    words = [*TINY, f"--data.train={made.train}", f"--data.valid={made.valid}", f"--training.output={tmp_path / 'o'}"]
    words += ["--parallel.pipeline", "2", f"--checkpoint.directory={tmp_path / 'kept'}", "--checkpoint.every", "2"]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [*start, str(tmp_path / "run.py"), *words], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("left: [] ['MainThread']") == 2, done.stdout[-1000:]
