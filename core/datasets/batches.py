"""Batches for next-token prediction: which rows, in which order, on which rank.

Legend: `b` rows in the global batch, `s` sequence length, `size` data parallel ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.datasets.order import sample_ids
from core.datasets.token_file import TokenFile

IGNORED_LABEL = -100  # torch's own default `ignore_index`


@dataclass(frozen=True, kw_only=True)
class GPTBatches:
    """Samples of `sequence_length` tokens from `token_file`, in an order fixed by `seed`.

    Sample i predicts tokens i*s+1 .. i*s+s from those before, so no token is predicted by two samples.
    Raises `ValueError` if the file is shorter than one sample.
    """

    token_file: TokenFile
    sequence_length: int
    global_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if wrong := [why for ok, why in self._rules() if not ok]:
            raise ValueError("GPTBatches: " + "; ".join(wrong))

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Every rule is one (holds, message) line, so all failures are told at once."""
        s, n = self.sequence_length, self.token_file.num_tokens
        yield s > 0, f"sequence_length={s} must be positive"
        yield (
            s < n,
            (
                f"sequence_length={s} needs {s + 1} tokens (one more to predict), the file has {n}; "
                f"use at most {n - 1}, or more text"
            ),
        )
        yield self.global_batch_size > 0, f"global_batch_size={self.global_batch_size} must be positive"

    @property
    def num_samples(self) -> int:
        """Number of whole samples, which is the length of an epoch."""
        return (self.token_file.num_tokens - 1) // self.sequence_length

    def batch(self, step: int, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
        """`tokens` and `labels`, int64 `[b/size, s]`: the rank's rows of the global batch number `step`.

        The global batch does not depend on `size`; rank r has its rows r*b/size .. (r+1)*b/size.
        Raises `ValueError` if the batch does not divide, the rank is not below size, or step is negative.
        """
        mine = _share(self.global_batch_size, rank, size)
        ids = sample_ids(step, self.global_batch_size, self.num_samples, seed=self.seed)[mine]
        s = self.sequence_length
        rows = np.stack([self.token_file.tokens(i * s, i * s + s + 1) for i in ids.tolist()])
        return _to_torch(rows[:, :-1], rows[:, 1:])

    def sequential(self, batch_size: int, rank: int = 0, size: int = 1) -> Iterator[dict[str, Tensor]]:
        """The file in order, once: `tokens` and `labels`, int64 `[batch_size/size, s]`, for validation.

        Over all ranks, every token but the file's first is a label exactly once. Where the file does not
        fill a row or a batch, tokens are 0 and labels `IGNORED_LABEL`, so that all batches have one shape
        and all ranks the same number of batches: add up losses, a mean over a batch may be 0/0.
        Raises `ValueError` if the batch does not divide or the rank is not below size.
        """
        mine = _share(batch_size, rank, size)
        windows = -(-(self.token_file.num_tokens - 1) // self.sequence_length)
        return (self._rows(first + mine.start, first + mine.stop) for first in range(0, windows, batch_size))

    def _rows(self, first: int, last: int) -> dict[str, Tensor]:
        """Windows first .. last of the file in order, filled up beyond its end."""
        s, n = self.sequence_length, self.token_file.num_tokens
        tokens = np.zeros((last - first) * s, np.int64)
        labels = np.full((last - first) * s, IGNORED_LABEL, np.int64)
        count = max(0, min(last * s, n - 1) - first * s)
        if count:
            stream = self.token_file.tokens(first * s, first * s + count + 1)
            tokens[:count], labels[:count] = stream[:-1], stream[1:]
        return _to_torch(tokens.reshape(-1, s), labels.reshape(-1, s))


def _share(batch_size: int, rank: int, size: int) -> slice:
    """The rank's rows of a batch."""
    if batch_size < 1 or size < 1 or batch_size % size:
        valid = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
        raise ValueError(f"a batch of {batch_size} rows does not divide among {size} ranks; {valid} would do")
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} must lie between 0 and {size - 1}, size={size}")
    rows = batch_size // size
    return slice(rank * rows, (rank + 1) * rows)


def _to_torch(tokens: npt.NDArray[np.integer], labels: npt.NDArray[np.integer]) -> dict[str, Tensor]:
    """Copies: the file's own view is read-only and narrower than int64."""
    return {
        "tokens": torch.from_numpy(tokens.astype(np.int64)),
        "labels": torch.from_numpy(labels.astype(np.int64)),
    }
