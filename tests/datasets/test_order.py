"""The order of the data: a bijection for every n, every epoch complete, one integer resumes it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.datasets.order import permute, sample_ids


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**40))
def test_permutation_is_a_bijection(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed=seed, epoch=epoch).tolist()) == list(range(n))


def test_every_small_n_is_a_bijection():
    for n in range(1, 130):
        assert set(permute(np.arange(n), n, seed=5).tolist()) == set(range(n)), n


def test_large_n_stays_in_range_and_distinct():
    for n in (2**31 + 1, 10**12 + 39, 2**62):
        index = np.concatenate([np.arange(500), np.arange(n - 500, n)])
        found = permute(index, n, seed=3)
        assert len(set(found.tolist())) == 1000
        assert found.min() >= 0
        assert found.max() < n


def test_golden_values():
    """These are a contract: changed, every run in progress would resume on other data."""
    assert permute(np.arange(10), 10, seed=1234).tolist() == [5, 3, 6, 4, 1, 0, 8, 7, 9, 2]
    found = permute([0, 1, 2], 10**12, seed=7, epoch=3).tolist()
    assert found == [416544143483, 643503337289, 466923694940]


def test_shape_is_kept_and_a_scalar_agrees_with_the_array():
    whole = permute(np.arange(12).reshape(3, 4), 12, seed=1)
    assert whole.shape == (3, 4)
    assert whole.dtype == np.int64
    assert [int(permute(i, 12, seed=1)) for i in range(12)] == whole.reshape(-1).tolist()


def test_seeds_and_epochs_differ():
    orders = {tuple(permute(np.arange(50), 50, seed=s, epoch=e).tolist()) for s in range(8) for e in range(8)}
    assert len(orders) == 64


def test_every_sample_reaches_every_place_equally_often():
    n, epochs = 12, 1200
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), permute(np.arange(n), n, seed=0, epoch=epoch)] += 1
    chi_square = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    assert chi_square < 200  # 121 degrees of freedom: 5 standard deviations above their mean


def test_neighbours_are_not_correlated():
    order = permute(np.arange(20_000), 20_000, seed=2).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03


@settings(max_examples=25, deadline=None)
@given(samples=st.integers(1, 40), batch=st.integers(1, 90), seed=st.integers(0, 10**6))
def test_every_epoch_visits_each_sample_once(samples, batch, seed):
    steps = -(-3 * samples // batch)
    stream = np.concatenate([sample_ids(step, batch, samples, seed=seed) for step in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_the_epochs_of_the_stream_have_orders_of_their_own():
    epochs = {tuple(sample_ids(step, 30, 30, seed=4).tolist()) for step in range(6)}
    assert len(epochs) == 6


def test_the_stream_does_not_depend_on_the_batch_size():
    small = np.concatenate([sample_ids(step, 4, 10, seed=9) for step in range(12)])
    large = np.concatenate([sample_ids(step, 16, 10, seed=9) for step in range(3)])
    assert small.tolist() == large.tolist()


def test_any_step_costs_the_same():
    """A step that no loop could count to: the order is computed, not replayed."""
    ids = sample_ids(10**15, 8, 10**9, seed=1)
    assert len(set(ids.tolist())) == 8
    assert ids.max() < 10**9


@pytest.mark.parametrize(
    ("index", "n", "message"),
    [
        ([0], 0, "n=0 must lie between 1 and"),
        ([0], 2**62 + 1, "n=4611686018427387905"),
        ([2, 7], 7, "positions 2 to 7 are not all inside 0 to 6"),
        ([-1], 7, "positions -1 to -1"),
    ],
)
def test_out_of_range_is_refused(index, n, message):
    with pytest.raises(ValueError, match=message):
        permute(index, n, seed=0)


@pytest.mark.parametrize(
    ("args", "message"),
    [((-1, 4, 8), "step=-1"), ((0, 0, 8), "global_batch_size=0"), ((0, 4, 0), "num_samples=0")],
)
def test_bad_sizes_are_refused(args, message):
    with pytest.raises(ValueError, match=f"{message} must be at least"):
        sample_ids(*args, seed=0)
