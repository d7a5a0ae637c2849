"""Every collective equals its plain definition, on gloo's composed paths too, counts its bytes, and names misuse."""

import time

import pytest
import torch
import torch.distributed as dist

from core.parallel_state import ParallelConfig, ParallelState
from core.parallel_state.collectives import (
    all_gather,
    all_gather_objects,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    irecv,
    isend,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from tests.pool import Pool
from tests.states import state

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def inputs(world, dtype):
    """Every rank's input, known to all: small integers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(-8, 8, (4 * world, 3), generator=generator).to(dtype) for _ in range(world)]


def equal_definitions():
    world, rank = dist.get_world_size(), dist.get_rank()
    group = state(tp=world).group("tp")
    for dtype in DTYPES:
        xs = inputs(world, dtype)
        total, mine = torch.stack(xs).sum(0), xs[rank]
        rows = slice(rank * 4, rank * 4 + 4)
        assert torch.equal(all_reduce(mine.clone(), group), total)
        assert torch.equal(start_all_reduce(mine.clone(), group).wait(), total)
        assert torch.equal(all_reduce(mine.clone(), group, "max"), torch.stack(xs).amax(0))
        assert torch.equal(all_reduce(mine.clone(), group, "min"), torch.stack(xs).amin(0))
        assert torch.equal(reduce_scatter(mine, group), total[rows])
        assert torch.equal(start_reduce_scatter(mine, group).wait(), total[rows])
        assert torch.equal(all_gather(mine, group), torch.cat(xs))
        assert torch.equal(start_all_gather(mine.t(), group).wait(), torch.cat([x.t() for x in xs]))
        assert torch.equal(all_to_all(mine, group), torch.cat([x[rows] for x in xs]))
        assert torch.equal(broadcast(mine.clone(), group, world - 1), xs[-1])
        assert torch.equal(mine, inputs(world, dtype)[rank]), "inputs are not changed"
    barrier(group)
    return all_gather_objects({"rank": rank}, group)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives_equal_their_definitions(ranks, world):
    assert ranks(equal_definitions, world=world) == [[{"rank": r} for r in range(world)]] * world


def other_dtypes_and_strides():
    world, rank = dist.get_world_size(), dist.get_rank()
    group = state(tp=world).group("tp")
    for dtype in (torch.int32, torch.int64):
        part = reduce_scatter(torch.full((2 * world, 2), rank + 1, dtype=dtype), group)
        assert part.dtype == dtype and (part == world * (world + 1) // 2).all()
    x = torch.full((3, 2), float(rank)).t()
    view = x[:, 1:]
    all_reduce(view, group)
    assert (x[:, 1:] == world * (world - 1) / 2).all() and (x[:, 0] == rank).all()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_integers_and_views_are_reduced_alike_in_groups_of_every_size(ranks, world):
    ranks(other_dtypes_and_strides, world=world)


def late(world, kind):
    """Rank 0 waits for a rank that never comes; the group's timeout ends it."""
    ps = ParallelState.build(ParallelConfig(tensor=2 if kind == "own" else world), device="cpu")
    ps.set_timeout(1.0)
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            all_reduce(torch.ones(3), ps.group("tp"))
    return time.monotonic() - begin


@pytest.mark.parametrize(
    "world, kind",
    [
        (2, "world's"),
        pytest.param(4, "own", marks=pytest.mark.full),
        pytest.param(4, "world's", marks=pytest.mark.full),
    ],
)
def test_a_wait_is_bounded_by_the_timeout(world, kind):
    pool = Pool()  # a pair that timed out is closed for ever: not the session's pool
    try:
        assert pool(late, world, kind, world=world)[0] < 10
    finally:
        pool.close()


def uneven_all_to_all():
    rank, group = dist.get_rank(), state(tp=2).group("tp")
    x = torch.arange(6).view(3, 2) + 100 * rank
    out = all_to_all(
        x, group, send_rows=[1, 2] if rank == 0 else [2, 1], receive_rows=[1, 2] if rank == 0 else [2, 1]
    )
    return out.tolist()


def test_all_to_all_of_uneven_rows(ranks):
    assert ranks(uneven_all_to_all) == [[[0, 1], [100, 101], [102, 103]], [[2, 3], [4, 5], [104, 105]]]


def counted():
    ps = ParallelState.build(ParallelConfig(tensor=2), device="cpu")
    all_reduce(torch.zeros(10, dtype=torch.float32), ps.group("tp"))
    all_gather(torch.zeros(10, dtype=torch.float32), ps.group("tp"))
    all_reduce(torch.zeros(10), ps.group("dp"))  # one rank: nothing happens, nothing is counted
    traffic = ps.traffic()["tp"]
    ps.destroy()
    return traffic.calls, traffic.bytes, traffic.seconds > 0, list(ps.traffic())


def test_traffic_is_counted_per_group(ranks):
    assert ranks(counted) == [(2, 120, True, [])] * 2


def misaligned(kind):
    ps = ParallelState.build(ParallelConfig(tensor=2), device="cpu", debug=True)
    group, rank = ps.group("tp"), dist.get_rank()
    all_reduce(torch.zeros(2), group)
    if kind == "shape":
        all_reduce(torch.zeros(2 + rank), group)
    elif kind == "dtype":
        all_reduce(torch.zeros(2, dtype=(torch.float32, torch.float64)[rank]), group)
    elif kind == "op":
        all_reduce(torch.zeros(2), group, ("sum", "max")[rank])
    elif rank == 0:
        all_reduce(torch.zeros(2), group)
    else:
        all_reduce(torch.zeros(2), group)


@pytest.mark.parametrize("kind", ["shape", "dtype", "op", "site"])
def test_debug_mode_names_ranks_that_call_something_else(ranks, kind):
    with pytest.raises(
        AssertionError, match=r"the ranks of group tp make different collective calls:\n  rank 0: all_r"
    ):
        ranks(misaligned, kind=kind)


def exchange():
    rank, group = dist.get_rank(), state(tp=2).group("tp")
    if rank == 0:
        sent = [isend(torch.full((2, 3), 7.0), 1, group), isend(torch.tensor([True, False]), 1, group)]
        plain = isend(torch.ones(4), 1, group, header=False, tag=3)
        for work in (*sent, plain):
            work.wait()
        return None
    first = irecv((2, 3), torch.float64, 0, group)
    second = irecv((2,), torch.bool, 0, group)
    plain = irecv((4,), torch.float64, 0, group, header=False, tag=3)
    return first.wait().sum().item(), second.wait().tolist(), plain.wait().sum().item()


def test_point_to_point(ranks):
    assert ranks(exchange)[1] == (42.0, [True, False], 4.0)


def wrong_message():
    rank, group = dist.get_rank(), state(tp=2).group("tp")
    if rank == 0:
        sent = isend(torch.zeros(8), 1, group)
        barrier(state(tp=2).world)
        irecv((1,), torch.int64, 1, group).wait()
        sent.wait()
        return
    with pytest.raises(
        ValueError, match=r"rank 0 sends shape \(8,\) of torch.float64, rank 1 expects \(4, 4\) of torch.f"
    ):
        irecv((4, 4), torch.float32, 0, group)
    barrier(state(tp=2).world)
    done = isend(torch.zeros(1, dtype=torch.int64), 0, group)
    irecv((8,), torch.float64, 0, group, header=False).wait()
    done.wait()


def test_a_message_of_another_shape_or_dtype_is_refused(ranks):
    ranks(wrong_message)


def test_uneven_reduce_scatter_is_refused(ranks):
    with pytest.raises(AssertionError, match=r"dim 0 of \(3, 2\) does not divide over 2 ranks"):
        ranks(uneven_reduce_scatter)


def uneven_reduce_scatter():
    reduce_scatter(torch.zeros(3, 2), state(tp=2).group("tp"))
