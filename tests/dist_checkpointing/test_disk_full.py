"""A disk that is full, and files that may not grow: the old checkpoint stays, the error says how much is needed."""

import os
import re
import shutil
import subprocess

import pytest
import torch

from core.dist_checkpointing import CheckpointManager
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from core.dist_checkpointing.writing.job import SLACK
from tests.dist_checkpointing import small, victims
from tests.dist_checkpointing.aftermath import leftovers
from tests.dist_checkpointing.test_kills import job

DISK = 8 << 20
PAYLOAD = sum(4 * part.data.numel() for part in small.tensors(victims.large(0)))


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 8 MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(mounted)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root may mount a small file system here")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def assert_told(victim):
    """Every rank, in numbers or with the rank that tells them; then the job went on. Returns what was raised."""
    victim.ended()
    texts, kinds = [], []
    for told in victim.told:
        assert not told["raised"] and told["saved"] == [3], told
        ((kind, text, needed),) = told["failed"]
        assert needed == (PAYLOAD + SLACK if kind == "DiskFullError" else None)
        kinds.append(kind)
        texts.append(text)
    for text in texts:
        said = re.search(r"(\d+) bytes needed, (\d+) free; the older checkpoints are intact", text)
        # where the disk is full before rank 1 can leave word, rank 0 names it, and rank 1 tells its own caller
        elsewhere = "rank 0 tells why" in text or "no receipt of 1 of 2 ranks, 1; look at their logs" in text
        assert (said and int(said[1]) == PAYLOAD + SLACK) or elsewhere, texts
    assert any("bytes needed" in text for text in texts)
    return kinds


def assert_kept(root, single):
    manager = CheckpointManager(root, ps=single)
    assert manager.steps() == [1, 3] and not leftovers(root)
    found = victims.large(0)
    manager.load(1, found)
    expected = victims.large(1)["arrays"]
    for key, (part,) in found["arrays"].items():
        assert torch.equal(part.data, expected[key][0].data)
    assert check(open_checkpoint_dir(manager.url(1)), full=True) == []


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("hidden", [False, True], ids=["told", "hidden"])
def test_a_full_disk(world, beside, hidden, disk, single):
    """`told`: before anything is written. `hidden`: only the writes find out."""
    with job(victims.filling, world, disk / "job", beside=beside, hidden=hidden) as victim:
        kinds = assert_told(victim)
        assert ("RuntimeError" if beside and hidden else "DiskFullError") in kinds
        if not hidden:
            free = int(re.search(r"(\d+) free", victim.told[0]["failed"][0][1])[1])
            assert DISK - PAYLOAD - SLACK < free < PAYLOAD + SLACK  # nothing of the second was there
        assert_kept(victim.root, single)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full)])
def test_files_that_may_not_grow(world, tmp_path, single):
    """On the last rank only: the other one hears of it."""
    with job(victims.filling, world, tmp_path / "job", beside=False, limit=100_000) as victim:
        assert assert_told(victim) == ["OSError", "DiskFullError"][-world:]
        assert "rank 1: " in victim.told[0]["failed"][0][1] or world == 1
        assert_kept(victim.root, single)
