"""The order of the data as a pure function of (seed, step): no index is built, and one integer resumes it."""

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
# draws that are computed together: the cost of numpy's calls is that of one sample otherwise
_BLOCK = 1024


def permute(index: npt.ArrayLike, n: int, *, seed: int, epoch: int = 0) -> Ids:
    """Where each position of [0, n) goes in a random-looking permutation chosen by (seed, epoch).

    index: integers of any shape  ->  int64 of the same shape. Distinct positions go to distinct places.
    Costs O(index), nothing grows with n. Raises `ValueError` if n or an index is out of range.
    """
    positions = np.asarray(index, dtype=np.int64)
    if not 0 < n <= 2**62:
        raise ValueError(f"n={n} must lie between 1 and 2^62; give the number of samples")
    if positions.size and not (positions.min() >= 0 and positions.max() < n):
        raise ValueError(
            f"positions {positions.min()} to {positions.max()} are not all inside 0 to {n - 1}; "
            "take them modulo n and count the epochs"
        )
    # A Feistel network permutes 2^(2*half) numbers, up to 4n of them. Whoever lands outside [0, n) walks on
    # along its cycle until inside: that is again a permutation of [0, n), after at most 4 steps on average.
    half = max(2, ((n - 1).bit_length() + 1) // 2)
    # a permutation of its own for each epoch
    keys = _round_keys(seed, epoch)
    values = _feistel(positions.reshape(-1).astype(np.uint64), half, keys)
    while (outside := values >= n).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64).reshape(positions.shape)


def _round_keys(seed: int, epoch: int) -> _Words:
    """Eight keys `[8]`, unrelated for neighbouring seeds and epochs."""
    return np.frombuffer(
        hashlib.blake2b(f"{seed},{epoch}".encode(), digest_size=64).digest(), "<u8"
    )


def _feistel(values: _Words, half: int, keys: _Words) -> _Words:
    """A permutation of the numbers below 2^(2*half), chosen by the keys of the rounds."""
    mask = np.uint64((1 << half) - 1)
    bits = np.uint64(half)
    # a round can be undone, since one half goes through unchanged: so the whole is a permutation
    high = values >> bits
    low = values & mask
    for key in keys:
        high, low = low, high ^ (_mix(low ^ key) & mask)
    return (high << bits) | low


def _mix(x: _Words) -> _Words:
    """The finaliser of splitmix64: every bit of x moves every bit of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_ids(step: int, global_batch_size: int, num_samples: int, *, seed: int) -> Ids:
    """The samples of global batch number `step`: int64 `[global_batch_size]`; for programs that want to know them.

    Training draws the same ones with `draws`, blend by blend; the order itself is `permute`'s.

    Samples are taken one after the other, step after step; every `num_samples` of them are one epoch, which
    visits each sample once in an order of its own. A batch may reach into the next epochs.
    Raises `ValueError` if step is negative or a size is not positive.
    """
    for name, value, minimum in (
        ("step", step, 0),
        ("global_batch_size", global_batch_size, 1),
        ("num_samples", num_samples, 1),
    ):
        if value < minimum:
            raise ValueError(f"{name}={value} must be at least {minimum}")
    start = step * global_batch_size
    return draws(start, start + global_batch_size, num_samples, seed=seed)


def draws(start: int, stop: int, num_samples: int, *, seed: int) -> Ids:
    """Entries start .. stop of the endless stream of samples: int64 `[stop - start]`.

    Entry k is sample k % num_samples of the permutation of epoch k // num_samples. A pure function; what is computed
    together and not asked for yet is cached, so that drawing in order costs little.
    """
    drawn = []
    while start < stop:
        epoch, position = divmod(start, num_samples)
        block = _block(position // _BLOCK, epoch, num_samples, seed)
        ids = block[position % _BLOCK :][: stop - start]
        drawn.append(ids)
        start += len(ids)
    if drawn:
        return np.concatenate(drawn)
    return np.zeros(0, np.int64)


@lru_cache(maxsize=64)
def _block(number: int, epoch: int, num_samples: int, seed: int) -> Ids:
    first = number * _BLOCK
    return permute(
        np.arange(first, min(num_samples, first + _BLOCK)), num_samples, seed=seed, epoch=epoch
    )
