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
# one string: what print writes in pieces, two ranks mix
threads = [t.name for t in threading.enumerate()]
sys.stdout.write(f"left: {[name for name in names if 'gloo' in name]} {threads}\\n")
sys.stdout.flush()
"""


LOOP = """
import atexit, glob, sys

def tell():
    names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
    sys.stdout.write(f"left: {[name for name in names if 'gloo' in name]}\\n")  # one string, which ranks do not mix
    sys.stdout.flush()

atexit.register(tell)  # runs last
from core.training import initialize
from torch import nn

import torch

class Rows:
    def batch(self, step, rank=0, size=1):
        return {"input": torch.ones(4, 3)}

config = {"device": "cpu", "training": {"global_batch_size": 8, "micro_batch_size": 4, "train_steps": 2}}
model, *_ = initialize(nn.Linear(3, 3), config, batches=Rows(), loss_fn=lambda y, batch: (y.sum(), 4))
model.train_step(Rows().batch(0))
if "destroys" in sys.argv:
    torch.distributed.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.parametrize("words", [[], ["destroys"]])
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads have names under /proc only")
def test_a_loop_of_ones_own_leaves_none_either(tmp_path, words):
    (tmp_path / "loop.py").write_text(LOOP)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [*start, str(tmp_path / "loop.py"), *words], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    if not words:  # torch's own groups are the program's
        assert done.stdout.count("left: []") == 2, done.stdout[-1000:]


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
        [*start, str(tmp_path / "run.py"), *words], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("left: [] ['MainThread']") == 2, done.stdout[-1000:]
