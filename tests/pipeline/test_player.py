import re

import pytest

from core.pipeline.schedule.actions import looped
from core.pipeline.schedule.player import Costs, check, play
from core.pipeline.schedule.schedules import make
from tests.pipeline.plays import over_ideal, play_whole, written

TWO = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1I1 1W1"


def test_a_complete_schedule_passes():
    check(written(TWO, (0, 1)))
    check(written(TWO, (0, 1)), 2)
    check(written("0F0 0R0 0I0 0W0", (0,)))
    check(written("0UNSHARD 0RECV_F0 0F0 0B0 0REDUCE_GRAD", (0,)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO.replace("0B1", ""), "misses 0I1: stage 0 (rank 0) never does I of microbatch 1 of 2"),
        (TWO.replace("1W1", ""), "misses 1W1: stage 1 (rank 1) never does W of microbatch 1 of 2"),
        (
            TWO.replace("0F1 ", "").replace("0B1", ""),
            "misses 0F1: stage 0 (rank 0) never does F of microbatch 1 of 2",
        ),
        (TWO.replace("0F1", "0F1 0F1"), "rank 0: 0F1 is repeated: a stage does each microbatch once"),
        (TWO.replace("0B1", "0B1 0I1"), "rank 0: 0I1 is repeated"),
        (TWO.replace("1W1", "1W1 1B1"), "rank 1: 1B1 is repeated"),
        (TWO.replace("0F1", "1F1"), "rank 0: 1F1 belongs to rank 1, where stage 1 is placed"),
        (TWO.replace("0F1", "2F1"), "rank 0: 2F1 is none of its 2 stages and 2 microbatches"),
        (TWO.replace("1F1", "1F"), "rank 1: 1F is none of its 2 stages and 2 microbatches"),
        (TWO.replace("1F0 1B0", "1B0 1F0"), "rank 1: 1B0 comes before 1F0, whose result it needs"),
        (TWO.replace("1I1 1W1", "1W1 1I1"), "rank 1: 1W1 comes before 1I1, whose result it needs"),
        (TWO.replace("0F0", "0R0 0F0"), "rank 0: 0R0 comes before 0F0, whose result it needs"),
        (TWO.replace("1W1", "1R1 1W1"), "rank 1: 1R1 comes after the backward that would need it"),
    ],
)
def test_check_names_the_wrong_action(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(written(text, (0, 1)))


def test_check_counts_the_microbatches():
    with pytest.raises(ValueError, match=r"misses 0F2: .* of microbatch 2 of 3"):
        check(written(TWO, (0, 1)), 3)
    with pytest.raises(ValueError, match="0F1 is none of its 2 stages and 1 microbatches"):
        check(written(TWO, (0, 1)), 1)


def test_play_names_the_circle():
    """Rank 0 waits as well, but for a rank of the circle."""
    schedule = written("0F0 3F0 0F1 3F1 0B0 0B1 3B0 3B1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1", (0, 1, 2, 0))
    check(schedule)
    with pytest.raises(ValueError) as error:
        play(schedule)
    assert str(error.value) == (
        "schedule 'custom' never ends: rank 2 stops at 2F1 and waits for 1F1 of rank 1, "
        "rank 1 stops at 1B0 and waits for 2I0 of rank 2, which comes no sooner"
    )


def test_play_names_a_rank_that_ends_without_the_action():
    with pytest.raises(
        ValueError, match="rank 1 stops at 1F0 and waits for 0F0 of rank 0, which has ended without it"
    ):
        play(written("\n1F0 1B0", (0, 1)))
    with pytest.raises(ValueError, match="rank 0 stops at 1F0 and waits for 0F0 of rank 0, which comes no sooner"):
        play(written("1F0 0F0", (0, 0)))


def test_b_sends_before_its_w():
    """Ours is I, message, W; in most other implementations the message leaves after W."""
    schedule = make("1f1b", 4, 8)
    assert over_ideal(play(schedule)) == 1.25
    assert over_ideal(play(schedule, fused_backward=True)) == 1.375


def test_messages_take_their_time_between_ranks_only():
    assert play(written("0F0 1F0 1B0 0B0", (0, 0)), Costs(comm=5)).makespan == 6
    apart = written("0F0 0B0\n1F0 1B0", (0, 1))
    assert play(apart, Costs(comm=5)).makespan == 1 + 5 + 2 + 5 + 2
    assert play(apart, Costs(comm=5), fused_backward=True).makespan == 1 + 5 + 3 + 5 + 2


def test_costs_of_each_stage():
    played = play(written("0F0 0I0 0W0\n1F0 1I0 1W0", (0, 1)), Costs(F=(1, 3), I=2, W=(1, 0.5)))
    assert [[(str(a), start, end) for a, start, end in row] for row in played.timeline.rows] == [
        [("0F0", 0, 1), ("0I0", 6, 8), ("0W0", 8, 9)],
        [("1F0", 1, 4), ("1I0", 4, 6), ("1W0", 6, 6.5)],
    ]
    assert played.makespan == 9
    assert played.timeline.busy(0) == 4
    assert played.bubble == pytest.approx(1 - 9.5 / 18)


def test_memory_curve():
    """F saves the input, R makes the graph, I leaves what W needs; without R the F makes the graph."""
    costs = Costs(saved=0.25, graph=1.0, waiting=0.5)
    played = play(written("0F0 0F1 0R0 0I0 0I1 0W0 0W1", (0,)), costs)
    assert played.memory == (((0, 0.25), (1, 1.25), (2, 2.0), (4, 1.5), (5, 1.0), (6, 0.5), (7, 0.0)),)
    assert played.peaks == (2.0,)
    fused = play(written("0F0 0B0 0F1 0B1", (0,)), costs)
    assert [held for _, held in fused.memory[0]] == [1.0, 0.5, 0.0, 1.0, 0.5, 0.0]  # B: I ends before its W


def test_memory_ends_at_nothing_and_peaks_are_those_of_the_curve():
    for name in ("1f1b", "zb-v", "v-min"):
        played = play_whole(make(name, 4, 6), saved=0.1, waiting=0.7)
        for rank, curve in enumerate(played.memory):
            assert curve[-1][1] == pytest.approx(0)
            assert played.peaks[rank] == max(held for _, held in curve)
            assert [time for time, _ in curve] == sorted(time for time, _ in curve)


def test_costs_of_a_slice_divide_and_comm_stays():
    assert Costs(F=3, comm=0.5, graph=1).divided(2) == Costs(1.5, 0.5, 0.5, 0.5, 0.5, 0, 0.5, 0.5)


def test_nothing_to_play():
    played = play(written("", looped(1)))
    assert (played.makespan, played.bubble, played.peak) == (0, 0, 0)
