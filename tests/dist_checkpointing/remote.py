"""A run in an object store, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

RUN = """
import sys, torch
from core.dist_checkpointing import CheckpointManager, load, save
from core.dist_checkpointing.storage.address import below
from core.parallel_state import ParallelState
url, single = sys.argv[1], ParallelState.single("cpu")
state = lambda value: {"w": torch.full((5, 3), float(value)), "step": value}
manager = CheckpointManager(url, ps=single, keep_last=1)
for step in (1, 2):
    manager.save_async(step, state(step)).wait()
step, found = manager.load_latest(state(0))
assert step == 2 == found["step"] and torch.equal(found["w"], state(2)["w"]) and manager.steps() == [2]
found = load(state(0), manager.url(2), ps=single)
assert torch.equal(found["w"], state(2)["w"])
manager.close()
plain = below(url, "plain")
save(state(3), plain, ps=single)
assert load(state(0), plain, ps=single)["step"] == 3
print("whole")
"""


def run(environment, *command):
    """In a process of its own, which has no settings of this machine's."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TENSORSTORE_"))}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=mine | environment,
        cwd=Path(__file__).parents[2],
        timeout=500,
    )
    return done.returncode, done.stdout + done.stderr
