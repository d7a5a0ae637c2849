"""The session-wide pool of ranks, and quick failures that name a rank."""

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


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(config, items):
    """Of two workers (`--dist loadgroup`) one has the tests of the pool, so that there is one pool; the other has the
    rest, file by file."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        has_pool = "_pool" in item.fixturenames
        item.add_marker(pytest.mark.xdist_group("pool" if has_pool else item.location[0]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """The seed that the pool's ranks start from: a model takes its initial weights from it."""
    torch.manual_seed(0)
