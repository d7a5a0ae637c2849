"""One job per directory, steps kept and found again, over directories and an object store."""

import os
import socket

import pytest
import torch

from core.dist_checkpointing import CheckpointManager, load, load_common_state_dict, save
from core.dist_checkpointing.planning.ranks import DamagedCheckpoint
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir, open_dir
from tests.dist_checkpointing import small
from tests.states import state as parallel


@pytest.fixture(params=["directory", "memory"])
def root(request, tmp_path):
    return str(tmp_path / "run") if request.param == "directory" else f"memory://{tmp_path.name}/run"


def test_saves_keeps_and_loads(root, single):
    manager = CheckpointManager(root, ps=single, keep_last=2, keep_every=4)
    for step in range(1, 8):
        stats = manager.save(step, small.state(step))
        assert stats.bytes > 0 and stats.seconds > 0
    assert manager.steps() == [4, 6, 7]
    found = small.state(0, empty=True)
    step, state = manager.load_latest(found)
    assert step == 7 and state["step"] == 7 and state["named"] == [7, 7]
    small.assert_holds(found, 7)
    manager.load(4, found)
    small.assert_holds(found, 4)
    with pytest.raises(ValueError, match="has no checkpoint step-00000005; steps there: 4, 6, 7"):
        manager.load(5, found)
    assert all(check(open_checkpoint_dir(manager.url(step)), full=True) == [] for step in manager.steps())
    manager.close()


def test_the_same_step_again(root, single):
    manager = CheckpointManager(root, ps=single)
    for seed in (1, 2, 3):
        manager.save(1, small.state(seed))
        found = small.state(0, empty=True)
        assert manager.load_latest(found)[0] == 1 and manager.steps() == [1]
        small.assert_holds(found, seed)
    manager.close()


def test_two_jobs_in_one_place(root, single):
    first, second = (CheckpointManager(root, ps=single) for _ in range(2))
    first.save(1, small.state(1))
    told = (
        rf"is in use by process {os.getpid()} on {socket.gethostname()}, whose heartbeat goes on; two jobs must not"
    )
    for call in (second.save, second.save_async):
        with pytest.raises(ValueError, match=told):
            call(2, small.state(2))
    found = small.state(0, empty=True)
    assert second.load_latest(found)[0] == 1, "reading is free"
    first.close()
    second.save(2, small.state(2))
    assert first.steps() == [1, 2]
    second.close()


def test_a_lock_that_was_taken_over(root, single):
    """A job that was silent for too long does not write beside its successor."""
    first = CheckpointManager(root, ps=single)
    first.save(1, small.state(1))
    place = open_dir(root)
    assert place.swap(".lock", place.read(".lock"), b'{"host": "other", "pid": 7, "uuid": "x", "time": 0}')
    with pytest.raises(RuntimeError, match=r"the lock .* now is that of process 7 on other"):
        first.save(2, small.state(2))
    assert first.steps() == [1]
    first.close()
    assert b"other" in place.read(".lock"), "the successor's lock stays"


def both_ranks(root):
    ps = parallel(tp=2)
    first, second = (CheckpointManager(root, ps=ps) for _ in range(2))
    first.save(1, small.state(1, ps.rank, 2))
    with pytest.raises(ValueError, match="" if ps.rank == 0 else "^rank 0: .* is in use by process"):
        second.prepare(small.state(2, ps.rank, 2))
    with pytest.raises(FileNotFoundError, match="has no checkpoint; start afresh"):
        CheckpointManager(f"{root}/none", ps=ps).load_latest({})
    with pytest.raises(ValueError, match="has no checkpoint step-00000009; steps there: 1"):
        first.load(9, {})
    hindered = CheckpointManager(root, ps=ps, timeout_s=0.1)
    if ps.rank == 0:
        os.makedirs(f"{root}/.tmp-step-00000003-{'a' * 32}")
    with pytest.raises(TimeoutError, match=r"after 0.1 s still being written: step-00000003 \(aaa"):
        hindered.load_latest(small.state(0, ps.rank, 2, empty=True))
    first.close()


def test_what_concerns_rank_0_is_told_to_all(ranks, tmp_path):
    ranks(both_ranks, str(tmp_path), world=2)


def test_one_checkpoint_in_a_store(root, single):
    url = f"{root}/x"
    for seed in (1, 2):
        save(small.state(seed), url, ps=single)
        found = small.state(0, empty=True)
        load(found, url, ps=single)
        small.assert_holds(found, seed)
    assert load_common_state_dict(url) == {"order": [2, 2], "step": 2}


def test_damage_in_an_object_store(single, tmp_path):
    root = f"memory://{tmp_path.name}"
    manager = CheckpointManager(root, ps=single)
    for step in (1, 2, 3):
        manager.save(step, small.state(step))
    store = open_dir(root)
    store.write("step-00000003/manifest.json", b'{"crc": 5, "uuid": "x"}')
    place = open_checkpoint_dir(manager.url(2))
    place.remove("optimizer/main/table/c.0.0")
    found = small.state(0, empty=True)
    assert manager.load_latest(found)[0] == 1
    small.assert_holds(found, 1)
    with pytest.raises(DamagedCheckpoint, match="optimizer/main/table/c"):
        manager.load(2, found)
    manager.close()


def test_what_a_manager_is_told(tmp_path, single):
    with pytest.raises(ValueError, match="when_busy='later' must be 'wait' or 'skip'"):
        CheckpointManager(tmp_path, ps=single, when_busy="later")
    with pytest.raises(ValueError, match="keep_last=0 must be at least 1"):
        CheckpointManager(tmp_path, ps=single, keep_last=0)
    manager = CheckpointManager(tmp_path, ps=single)
    with pytest.raises(ValueError, match="step -1: steps count from 0"):
        manager.save(-1, {"w": torch.ones(1)})
    manager.close()
    manager.close()
    assert manager.steps() == []


@pytest.mark.full
def test_a_manager_may_go_on_after_it_was_closed(tmp_path, single):
    manager = CheckpointManager(tmp_path, ps=single)
    for step in (1, 2):
        manager.save_async(step, {"w": torch.full((3,), float(step))})
        manager.close()
    assert manager.steps() == [1, 2]
