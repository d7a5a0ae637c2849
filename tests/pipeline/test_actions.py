import pytest

from core.pipeline.schedule.actions import COMPUTE, KINDS, Action, Schedule, check_placement, looped, v_shape


@pytest.mark.parametrize("kind", KINDS)
def test_an_action_is_its_text(kind):
    action = Action(kind, 12, 5 if kind in COMPUTE or kind[:4] in ("SEND", "RECV") else None)
    assert Action.parse(str(action)) == action
    assert Action.parse(f" {action} ") == action


def test_the_text_is_stage_kind_microbatch():
    assert str(Action("I", 2, 5)) == "2I5"
    assert str(Action("SEND_F", 0, 11)) == "0SEND_F11"
    assert str(Action("UNSHARD", 3)) == "3UNSHARD"
    assert Action.parse("1RESHARD") == Action("RESHARD", 1)


@pytest.mark.parametrize("text", ["", "F0", "2X5", "2I5 3I5", "2i5", "-1F0", "2I5x", "(0F4;7B1)OVERLAP_F_B"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is not an action; write stage, kind, microbatch as in 2I5"):
        Action.parse(text)


def test_a_schedule_is_its_text():
    schedule = Schedule.make([0, 1, 1, 0], [[Action("F", 0, 0), Action("UNSHARD", 3)], []], "mine: second try")
    assert Schedule.parse(schedule.text()) == schedule
    assert schedule.text() == "mine: second try: 0 1 1 0\n0F0 3UNSHARD\n\n"


def test_a_text_without_placement_is_refused():
    with pytest.raises(ValueError, match=r"starts with `name: rank of stage 0.*got '0F0 1F0'"):
        Schedule.parse("0F0 1F0\n")


def test_a_schedule_knows_its_numbers():
    schedule = Schedule.make(v_shape(2), [[Action("F", 0, 4), Action("R", 0, 4)], [Action("REDUCE_GRAD", 1)]])
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (2, 4, 5)
    assert schedule.stages_of(0) == (0, 3)
    assert schedule.recomputed == {(0, 4)}
    assert hash(schedule) == hash(Schedule.parse(schedule.text()))


def test_placements():
    assert looped(3) == (0, 1, 2)
    assert looped(2, 3) == (0, 1, 0, 1, 0, 1)
    assert v_shape(3) == (0, 1, 2, 2, 1, 0)
    assert v_shape(2, 4) == (0, 1, 1, 0, 0, 1, 1, 0)
    check_placement((1, 0, 1), 2)


def test_a_placement_covers_its_ranks():
    with pytest.raises(ValueError, match="gives no stage to rank 2 of 4 ranks; each needs at least 1 stage"):
        check_placement((0, 1, 3), 4)
    with pytest.raises(ValueError, match="puts a stage on rank 2, but there are 2 ranks, 0 to 1"):
        check_placement((0, 1, 2), 2)
