import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.pipeline.schedule.actions import Action, looped, v_shape
from core.pipeline.schedule.passes import add_gathers, add_recompute, forward_only, only_microbatches, split_backward
from core.pipeline.schedule.player import check, check_gathers, play
from core.pipeline.schedule.schedules import NAMED, make
from tests.pipeline.plays import play_whole, recompute_everywhere, written


def test_recompute_stands_before_its_backward_and_not_after_its_own_forward():
    schedule = written("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1W0 1I1 1W1", (0, 1))
    again = add_recompute(schedule)
    assert again.text() == "custom: 0 1\n0F0 0F1 0R0 0B0 0R1 0B1\n1F0 1I0 1F1 1W0 1R1 1I1 1W1\n"
    assert add_recompute(again) == again
    assert add_recompute(schedule, [1]).recomputed == {(1, 1)}
    assert add_recompute(schedule, []) == schedule


def test_gathers_stand_around_all_that_needs_whole_parameters():
    schedule = written("0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1B0 1F1 1B1", (0, 1))
    whole = add_gathers(schedule)
    assert (
        whole.text() == "custom: 0 1\n0UNSHARD 0F0 0F1 0I0 0W0 0I1 0RESHARD 0W1\n1UNSHARD 1F0 1B0 1F1 1B1 1RESHARD\n"
    )
    check_gathers(schedule)
    check_gathers(whole)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0UNSHARD 0F0 0B0 0RESHARD\n1F0 1B0", "1F0"),
        ("0UNSHARD 0F0 0RESHARD 0B0\n1UNSHARD 1F0 1B0", "0B0"),
        ("0UNSHARD 0F0 0RESHARD 0R0 0B0\n1UNSHARD 1F0 1B0", "0R0"),
    ],
)
def test_some_gathers_and_not_all_are_refused(text, action):
    with pytest.raises(ValueError, match=f"none before {action}: stage {action[0]} of 2 is not whole.*add_gathers"):
        check_gathers(written(text, (0, 1)))


@pytest.mark.parametrize(
    ("name", "ranks", "everywhere", "left_out"),
    [
        ("1f1b", 4, 1.281, 1.219),
        ("1f1b", 2, 1.094, 1.031),
        ("interleaved-1f1b", 4, 1.141, 1.094),
        ("zb-v", 4, 1.047, 1.047),
    ],
)
def test_recompute_left_out_shortens_the_step(name, ranks, everywhere, left_out):
    """Over the ideal with R everywhere, at 8 microbatches, of a fused B."""
    schedule = make(name, ranks, 8)
    steps = [play_whole(s, fused=True).makespan for s in (recompute_everywhere(schedule), add_recompute(schedule))]
    assert [round(step / (8 * 4), 3) for step in steps] == [everywhere, left_out]


def test_recompute_ahead_does_not_wait_for_the_gradient():
    """R as part of the backward waits for the gradient, as in other implementations: 1f1b 0.93, zb-v 0.957."""
    for name, ratio in (("1f1b", 1.28125 / 1.375), ("zb-v", 1.046875 / 1.09375)):
        schedule = make(name, 4, 8)
        folded = play_whole(schedule, fused=True, I=2).makespan
        assert play_whole(recompute_everywhere(schedule), fused=True).makespan / folded == pytest.approx(ratio)


def test_memory_of_recompute():
    plain, again = make("1f1b", 4, 8), add_recompute(make("1f1b", 4, 8))
    assert play(plain).peaks == (4, 3, 2, 1)
    assert play_whole(again, saved=0.1).peaks == pytest.approx((1.3, 1.2, 1.1, 1))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(NAMED)), st.integers(1, 6), st.integers(1, 12), st.integers(1, 12))
def test_some_microbatches_only(name, ranks, microbatches, kept):
    whole = make(name, ranks, microbatches)
    schedule = only_microbatches(whole, kept)
    check(schedule, min(kept, microbatches))
    assert play(schedule).makespan <= play(whole).makespan
    assert only_microbatches(whole, microbatches) == whole


def test_actions_of_a_whole_stage_stay():
    schedule = written("0UNSHARD 0F0 0F1 0B0 0B1 0REDUCE_GRAD", (0,))
    assert list(map(str, only_microbatches(schedule, 1).orders[0])) == ["0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD"]


def test_a_split_backward_is_i_and_w():
    schedule = make("interleaved-1f1b", 2, 4)
    split = split_backward(schedule)
    check(split)
    assert not any(action.kind == "B" for order in split.orders for action in order)
    assert play(split).makespan == play(schedule).makespan
    assert split_backward(split) == split


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 12), st.booleans())
def test_forward_only_is_complete_and_ends(ranks, chunks, microbatches, v):
    schedule = forward_only((v_shape if v else looped)(ranks, chunks), ranks, microbatches)
    wanted = {Action("F", stage, m) for stage in range(schedule.stages) for m in range(microbatches)}
    assert sorted(action for order in schedule.orders for action in order) == sorted(wanted)
    played = play(schedule)
    if microbatches % ranks == 0 and not v:
        assert played.makespan == microbatches * chunks + ranks - 1
