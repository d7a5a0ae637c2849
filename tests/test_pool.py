"""The pool itself: results in rank order, failures and crashes name the rank, hangs end."""

import os
import pickle
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


def test_a_worker_that_died_idle_is_named_and_the_pool_restarts(ranks):
    ranks(total, 1.0, world=4)
    ranks._processes[3].kill()
    ranks._processes[3].join()
    with pytest.raises(RankError, match="rank 3 of 4: the process died, exit code -9, before this job"):
        ranks(total, 1.0, world=4)
    assert ranks(total, 2.0, world=4)[0] == (0, 4, 12.0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_an_interrupt_leaves_no_unread_answers(ranks, monkeypatch, error):
    def interrupted(*_):
        raise error

    monkeypatch.setattr("tests.pool.wait", interrupted)
    with pytest.raises(error):
        ranks(total, 1.0, world=2)
    monkeypatch.undo()
    assert not ranks._processes
    assert ranks(total, 5.0, world=2)[0][2] == 5.0


def test_an_answer_to_another_job_is_not_taken(ranks):
    ranks(total, 1.0, world=1)
    ranks._pipes[0].send((ranks._number, pickle.dumps((1, total, (7.0,), {}))))
    ranks._pipes[0].poll(10)
    assert ranks(total, 3.0, world=2) == [(0, 2, 3.0), (1, 2, 3.0)]
    assert ranks(total, 4.0, world=2) == [(0, 2, 4.0), (1, 2, 4.0)]


def test_what_cannot_be_sent_fails_before_any_worker_has_it(ranks):
    ranks(total, 1.0, world=2)
    before = list(ranks._processes)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        ranks(lambda: None, world=2)
    assert ranks._processes == before and ranks(total, 1.0, world=2)[1][2] == 1.0
