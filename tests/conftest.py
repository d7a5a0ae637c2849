"""The session-wide pool of ranks, and quick failures that name a rank."""

import gc

import pytest
import torch

from core.parallel_state import ParallelState
from tests.pool import Pool


@pytest.fixture(scope="session")
def _pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(_pool):
    """`ranks(fn, world=n, **kwargs)` runs `fn` on n gloo ranks; results come in rank order."""
    return _pool


@pytest.fixture
def single():
    """One process on the CPU, whatever the machine has."""
    return ParallelState.single("cpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """How several workers share the tests. (`--dist loadgroup` groups nothing under pytest 9.2.)"""
    from tests.workers import OnePool

    return OnePool(config, log)


def pytest_collection_finish():
    """What was imported and collected lives to the end: no collection of garbage walks through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """The seed that the pool's ranks start from: a model takes its initial weights from it."""
    torch.manual_seed(0)
