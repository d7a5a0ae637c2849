"""The pool itself: results in rank order, failures and crashes name the rank, hangs end."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankError


def total(scale):
    x = torch.tensor([dist.get_rank() * scale])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


@pytest.mark.parametrize("world", [1, 2, 4, 2, 3])
def test_results_come_in_rank_order_for_every_world_size(ranks, world):
    expected = 2.0 * sum(range(world))
    assert ranks(total, 2.0, world=world) == [(r, world, expected) for r in range(world)]


def fail_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("lost")


def test_an_error_names_its_rank_and_the_pool_goes_on(ranks):
    with pytest.raises(RankError, match=r"rank 2 of 4: Traceback(.|\n)*KeyError: 'lost'"):
        ranks(fail_on, 2, world=4)
    assert ranks(total, 1.0, world=2)[0][2] == 1.0


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)


def test_a_crash_names_its_rank_and_the_pool_restarts(ranks):
    with pytest.raises(RankError, match="rank 1 of 2: the process died, exit code 7"):
        ranks(die_on, 1, world=2)
    assert ranks(total, 1.0, world=4)[3][2] == 6.0


def sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(60)


def test_a_hang_ends_and_names_its_rank(ranks):
    with pytest.raises(RankError, match="rank 0 of 2: no answer"):
        ranks(sleep_on, 0, world=2, timeout=1.0)
    assert ranks(total, 1.0, world=2)[1][2] == 1.0
