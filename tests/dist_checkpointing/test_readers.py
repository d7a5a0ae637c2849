"""Reading beside a job that saves and removes steps, and steps that the file system does not give."""

import pytest

from core.dist_checkpointing import CheckpointManager
from core.dist_checkpointing.planning.ranks import DamagedCheckpoint, agree
from core.dist_checkpointing.reading import loading
from core.dist_checkpointing.writing.saving import Saver
from tests.dist_checkpointing import small
from tests.dist_checkpointing.test_loading import falls_back
from tests.states import state as parallel


def test_the_newest_cannot_be_entered(tmp_path, single):
    """An OSError of the file system, not of a file: the older step is as good as ever."""
    Saver(str(tmp_path), single, durable=False).save("step-00000001", small.state(1))
    (tmp_path / "step-00000002").symlink_to("step-00000002")
    falls_back(str(tmp_path), "Too many levels of symbolic links", 1)


def outrun(root, moment):
    """A trainer that keeps one step commits the next one, once, at a moment of another process's reading."""
    trainer = CheckpointManager(root, ps=parallel(), keep_last=1)
    reader, found = CheckpointManager(root, ps=parallel()), small.state(0, empty=True)
    before = getattr(*moment)

    def overtaken(*arguments, **options):
        patch.undo()
        trainer.save(2, small.state(2))
        return before(*arguments, **options)

    trainer.save(1, small.state(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*moment, overtaken)
        step, _ = reader.load_latest(found)
    trainer.close()
    assert step == 2 and reader.steps() == [2]
    small.assert_holds(found, 2)


@pytest.mark.parametrize("moment", [(CheckpointManager, "url"), (loading, "read")], ids=["listed", "opened"])
def test_the_step_that_is_read_is_removed(tmp_path, moment):
    """A whole checkpoint is there at every moment."""
    outrun(str(tmp_path), moment)


def test_a_reader_that_is_always_outrun(tmp_path, single, monkeypatch):
    """It ends: no step is tried twice, and only so many that are gone."""
    steps = iter(range(1, 1000))
    monkeypatch.setattr(CheckpointManager, "steps", lambda self: [next(steps)])
    with pytest.raises(DamagedCheckpoint, match="none of the 11 steps"):
        CheckpointManager(tmp_path, ps=single).load_latest(small.state(0, empty=True))


def told_alike():
    """What rank 0 raises is to all what it is to those who catch it."""
    ps, caught = parallel(tp=2), []
    for problem in (
        PermissionError("x"),
        IsADirectoryError("x"),
        DamagedCheckpoint("x"),
        UnicodeError("x"),
        KeyError("x"),
    ):
        try:
            agree(problem if ps.rank == 0 else None, ps)
        except Exception as error:
            caught.append(type(error).__name__)
    return caught


def test_an_error_is_of_its_kind_on_every_rank(ranks):
    """Ranks that catch different errors go different ways, and wait for each other."""
    first, second = ranks(told_alike, world=2)
    assert first == ["PermissionError", "IsADirectoryError", "DamagedCheckpoint", "UnicodeError", "KeyError"]
    assert second == ["OSError", "OSError", "DamagedCheckpoint", "ValueError", "RuntimeError"]
