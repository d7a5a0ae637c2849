"""What the next job finds after a kill, and that it goes on; the states are those of `small`."""

from core.dist_checkpointing import CheckpointManager
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from tests.dist_checkpointing import small


def newest(root, single, stale_s=0.0):
    """(step, number) of the state that is loaded, every bit checked; zeros if there is none.

    stale_s: 0 where no writer is alive.
    """
    manager, found = CheckpointManager(root, ps=single, stale_s=stale_s, timeout_s=30.0), small.state(0, empty=True)
    try:
        step, state = manager.load_latest(found)
    except FileNotFoundError:
        return 0, 0
    small.assert_holds(found, state["step"])
    if not stale_s:  # a writer may be removing old steps
        assert not [line for other in manager.steps() for line in CheckpointRoot(root).problems(other, digests=True)]
    return step, state["step"]


def assert_goes_on(root, single, beside=False):
    """The next job saves, `beside`: also by its writer program, and leaves nothing of the other behind."""
    step, seed = newest(root, single)
    manager = CheckpointManager(root, ps=single, stale_s=0.0)
    manager.save(step + 1, small.state(seed + 1))
    if beside:
        manager.save_async(step + 1, small.state(seed + 2)).wait()
    manager.close()
    assert newest(root, single) == (step + 1, seed + 1 + beside)
    steps = {path.name for path in root.iterdir() if path.name.startswith("step-")}
    assert {path.name for path in root.iterdir()} <= {".logs", *steps}


def leftovers(root):
    """What a killed job left to sweep."""
    return {
        path.name.split("-")[0] for path in root.iterdir() if path.name.startswith((".tmp", ".trash", ".replaced"))
    }
