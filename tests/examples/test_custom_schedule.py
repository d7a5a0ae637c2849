"""The recipe: short, and it does what it says."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from core.pipeline import play
from core.pipeline.schedule.schedules import make
from tests import warm

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "custom_schedule.py")


def test_the_schedule_is_short_and_better_than_1f1b():
    recipe = runpy.run_path(SCRIPT, run_name="recipe")["weights_when_idle"]
    (function,) = [
        n for n in ast.parse(Path(SCRIPT).read_text()).body if getattr(n, "name", "") == "weights_when_idle"
    ]
    assert function.end_lineno - function.lineno + 1 < 20
    for ranks, microbatches in ((1, 1), (2, 3), (4, 8), (4, 2), (8, 16)):
        made = make(recipe, ranks, microbatches)  # checks it and plays it
        assert play(made).makespan <= play(make("1f1b", ranks, microbatches)).makespan
    assert play(make(recipe, 4, 8)).bubble < play(make("1f1b", 4, 8)).bubble


def run(*launcher):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    python = warm.python() if launcher else sys.executable
    return subprocess.run([python, *launcher, SCRIPT], env=env, capture_output=True, text=True, timeout=600)


def test_it_is_drawn_without_a_launcher():
    done = run()
    assert done.returncode == 0 and re.match(r"bubble 11\.1%, peak memory \(8\.0, .*\)\nrank 0 \| F0 F1", done.stdout)


@pytest.mark.full
def test_it_runs_under_torchrun():
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"mean loss \d\.\d+; what happened:\nrank 0 \| .*\nrank 1 \| ", done.stdout)
