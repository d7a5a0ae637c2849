"""Sums and gathers in place on flat buffers: in rank order, bit for bit, and loud where ranks differ."""

import functools

import pytest
import torch

from core.parallel_state import ParallelConfig, ParallelState
from core.parallel_state.collectives import (
    BACKWARD_TAG,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    own_part,
    start_gather_parts,
    start_sum_into_own,
)
from core.parallel_state.collectives.failure import Unanswered
from tests.states import state

N = 5


def buffer_of(rank, size, dtype=torch.float32):
    return torch.randn(N * size, generator=torch.Generator().manual_seed(rank), dtype=torch.float32).to(dtype)


def sums_on(wire):
    group = state().group("dp")
    mine = buffer_of(group.rank, group.size)
    before = mine.clone()
    pending = start_sum_into_own(mine, group, reduce_dtype=wire)
    own = pending.wait()
    assert own.data_ptr() == own_part(mine, group).data_ptr(), "in place"
    for rank, (now, then) in enumerate(zip(mine.split(N), before.split(N), strict=True)):
        assert rank == group.rank or torch.equal(now, then), "the other parts are as they were"
    traffic = group.traffic.calls
    whole = start_gather_parts(mine, group).wait()
    assert group.traffic.calls == traffic + 1 and whole.data_ptr() == mine.data_ptr()
    return whole


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=["float32", "over bfloat16"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_sum_is_taken_in_rank_order(ranks, world, wire):
    parts = [buffer_of(rank, world) for rank in range(world)]
    expected = []
    for owner in range(world):
        mine = [part.split(N)[owner] for part in parts]
        sent = [p if wire is None or rank == owner else p.to(wire).float() for rank, p in enumerate(mine)]
        expected.append(functools.reduce(torch.add, sent))
    for whole in ranks(sums_on, wire, world=world):
        assert torch.equal(whole, torch.cat(expected))


def test_one_rank_has_nothing_to_do():
    x = torch.ones(4)
    assert start_sum_into_own(x, None).wait() is x and start_gather_parts(x, None).wait() is x


def refuses():
    with pytest.raises(ValueError, match=r"shape \[3\] does not divide into 2 equal parts"):
        start_sum_into_own(torch.ones(3), state().group("dp"))


def test_a_buffer_that_does_not_divide_is_refused(ranks):
    ranks(refuses, world=2)


def at_different_buckets():
    ps = ParallelState.build(ParallelConfig(tensor=2), device="cpu", timeout_s=3)  # groups of this test's own
    group = ps.group("dp")
    try:
        with pytest.raises(RuntimeError) as told:
            start_gather_parts(torch.ones(4), group, tag=group.rank, label=f"layer {group.rank}").wait()
    finally:
        ps.destroy()
    return group.ranks, str(told.value)


def test_ranks_at_different_buckets_are_told_where(ranks):
    for rank, (members, text) in enumerate(ranks(at_different_buckets, world=4)):
        other = next(r for r in members if r != rank)
        assert f"rank {rank} waited in vain for rank {other} at layer {members.index(rank)}" in text
        assert "at most 3 s" in text and "runs other modules" in text


def backward_of_one():
    ps = ParallelState.build(ParallelConfig(context=2), device="cpu", timeout_s=3)
    group = ps.group("cp")
    tag = {"tag": BACKWARD_TAG} if group.rank == 0 else {}
    try:
        with pytest.raises(RuntimeError) as told:
            all_gather(torch.ones(4), group, **tag)
    finally:
        ps.destroy()
    return group.rank, str(told.value)


def test_a_backward_that_one_rank_leaves_out_never_meets_a_forward(ranks):
    for place, text in ranks(backward_of_one, world=4):
        what = "an exchange of parts in a backward pass" if place == 0 else "an exchange of parts (group"
        assert "waited in vain" in text and what in text


CALLS = {
    "an all-reduce": lambda group: all_reduce(torch.ones(4), group),
    "an exchange of parts": lambda group: all_gather(torch.ones(4), group),
    "an all-to-all": lambda group: all_to_all(torch.ones(4), group),
    "a broadcast": lambda group: broadcast(torch.ones(4), group, source=1),
}


def left_alone(name):
    """The first rank of each pair calls, the second one has left its groups."""
    ps = ParallelState.build(ParallelConfig(tensor=2), device="cpu", timeout_s=3)
    group = ps.group("dp")
    try:
        if group.rank == 1:
            return None
        with pytest.raises(Unanswered) as told:
            CALLS[name](group)
        return group.ranks, told.value.ranks, str(told.value)
    finally:
        ps.destroy()


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_left_is_named(ranks, name):
    for rank, told in enumerate(ranks(left_alone, name, world=4)):
        if told is not None:
            (_, other), named, text = told
            assert named == (other,) and f"rank {rank} waited in vain for rank {other} at {name} (group dp" in text
