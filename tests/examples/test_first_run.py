"""tests/data/first_run: a run of November 2026 under two tensor ranks, stopped after 2 of its 4 steps.

What it wrote (tokens, run.toml, a checkpoint) opens and continues, whatever has another name in the code by now.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from core.dist_checkpointing import lazy_tensors
from core.training.log.metrics import read_metrics
from tests.examples.test_pretrain import run

RUN = Path(__file__).parents[1] / "data" / "first_run"
STEP = RUN / "run" / "checkpoints" / "step-00000002"
LAYOUTS = {
    "as it was": [],
    "in one process": ["--parallel.tensor=1"],
    "as a pipeline": ["--parallel.tensor=1", "--parallel.pipeline=2"],
}


def test_every_array_is_read_as_zarr_reads_it():
    found = lazy_tensors(STEP)
    members = zarr.open_group(STEP, mode="r").members(max_depth=None)
    arrays = {name: array for name, array in members if isinstance(array, zarr.Array)}
    assert len(arrays) > 20 and arrays.keys() <= found.keys()
    for name, array in arrays.items():
        assert torch.equal(found[name][...], torch.from_numpy(np.asarray(array[...]))), name


def losses(folder):
    """step -> loss."""
    return {record.step: record.loss for record in read_metrics(folder / "run" / "metrics.jsonl")}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_continues(layout, tmp_path):
    shutil.copytree(RUN, tmp_path, dirs_exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher = [] if layout == "in one process" else torchrun
    done = run(launcher, ["--config=run/run.toml", "--device=cpu", *LAYOUTS[layout]], tmp_path)
    assert "step 2, next sample 8, optimizer 2 updates (0 skipped)" in done.stdout, done.stdout + done.stderr
    before, after = losses(RUN), losses(tmp_path)
    assert after.keys() == before.keys()
    assert [after[step] for step in (3, 4)] == pytest.approx([before[step] for step in (3, 4)], abs=1e-5)
