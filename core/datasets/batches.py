"""Batches for next-token prediction: which rows, in which order, on which rank.

Legend: `b` rows in the global batch, `s` sequence length, `size` data parallel ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.datasets.order import draws
from core.datasets.packing import IGNORED_LABEL, Packing
from core.datasets.splits import TokenSource

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class GPTBatches:
    """Samples of `sequence_length` tokens from `token_file`, in an order fixed by `seed`.

    Sample i predicts tokens i*s+1 .. i*s+s from those before: every token but the first is a label once per epoch.
    The last sample is filled up, with tokens 0 and labels `IGNORED_LABEL`. `token_file` is a `TokenFile` or a part
    of one. `end_of_text`, `reset_position_ids`, `reset_attention_mask` and `eod_mask_loss`: see `Packing`; what
    they ask for is in every batch. `allow_short` takes a text that is shorter than one sample.
    Raises `ValueError` if the text is shorter than one sample, or an option needs `end_of_text`.
    """

    token_file: TokenSource
    sequence_length: int
    global_batch_size: int
    seed: int
    end_of_text: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    allow_short: bool = False

    def __post_init__(self) -> None:
        problems = [message for holds, message in self._rules() if not holds]
        try:
            _ = self.packing
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("GPTBatches: " + "; ".join(problems))

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Every rule is one (holds, message) line, so that all failures are reported at once."""
        s = self.sequence_length
        n = self.token_file.num_tokens
        yield s > 0, f"sequence_length={s} must be positive"
        yield (
            s < n or (self.allow_short and n > 1),
            (
                f"sequence_length={s} needs {s + 1} tokens (one more to predict), the file has {n}; "
                f"use at most {n - 1}, or more text"
            ),
        )
        yield (
            self.global_batch_size > 0,
            f"global_batch_size={self.global_batch_size} must be positive",
        )
        yield (
            not getattr(self.token_file, "marks_answers", False),
            "the token file marks answers, and all tokens would be learned alike; use ConversationBatches",
        )

    @cached_property
    def packing(self) -> Packing:
        """The options about documents."""
        return Packing(
            end_of_text=self.end_of_text,
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            eod_mask_loss=self.eod_mask_loss,
        )

    @property
    def num_samples(self) -> int:
        """Number of samples, the last one perhaps filled up, which is the length of an epoch."""
        return -(-(self.token_file.num_tokens - 1) // self.sequence_length)

    def batch(self, step: int, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
        """`tokens` and `labels`, int64 `[b/size, s]`: the rank's rows of the global batch number `step`.

        With them `position_ids`, int64 `[b/size, s]`, and `document_begin`, int64 `[b/size, s]`, if asked for.
        The global batch does not depend on `size`; rank r has its rows r*b/size .. (r+1)*b/size.
        Raises `ValueError` if the batch does not divide, the rank is not below size, or step is negative.
        """
        if step < 0:
            raise ValueError(f"step={step} must be at least 0")
        return self.rows(step * self.global_batch_size, self.global_batch_size, rank, size)

    def rows(self, first: int, count: int, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
        """The same of the `count` rows from row `first` of the run on, for batches whose sizes change."""
        drawn = rows_from(first, count, rank, size)
        return self._windows(self._drawn(drawn))

    def sequential(
        self, batch_size: int, rank: int = 0, size: int = 1
    ) -> Iterator[dict[str, Tensor]]:
        """The text in order, once, as `batch` gives it, `[batch_size/size, s]`, for validation.

        Over all ranks, every token but the file's first is a label exactly once. Where the file does not
        fill a row or a batch, tokens are 0 and labels `IGNORED_LABEL`, so that all batches have one shape
        and all ranks the same number of batches: add up losses, a mean over a batch may be 0/0.
        Raises `ValueError` if the batch does not divide or the rank is not below size.
        """
        # the same share of every batch, also of the last, which reaches beyond the text
        local_rows = share(batch_size, rank, size)
        batch_starts = range(0, self.num_samples, batch_size)
        return (
            self._windows(range(start + local_rows.start, start + local_rows.stop))
            for start in batch_starts
        )

    def _drawn(self, drawn: range) -> list[int]:
        """The samples that are drawn as number drawn.start .. drawn.stop."""
        # a pure function of (seed, number): nothing is shuffled in advance, any step is found at once
        ids: list[int] = draws(drawn.start, drawn.stop, self.num_samples, seed=self.seed).tolist()
        return ids

    def _windows(self, windows: Sequence[int]) -> dict[str, Tensor]:
        """These samples of the text; beyond its end they are filled up."""
        tokens, labels = empty_rows(len(windows), self.sequence_length)
        self._copy(windows, range(len(windows)), tokens, labels)
        return self.packing.batch(torch.from_numpy(tokens), torch.from_numpy(labels))

    def fill(self, drawn: range, rows: Iterable[int], tokens: Rows, labels: Rows) -> None:
        """Write the samples that are drawn as number drawn.start .. drawn.stop to these rows of both arrays."""
        self._copy(self._drawn(drawn), rows, tokens, labels)

    def _copy(
        self, windows: Iterable[int], rows: Iterable[int], tokens: Rows, labels: Rows
    ) -> None:
        """Write the samples `windows` to these rows; the last sample of a text is filled up."""
        s = self.sequence_length
        read_tokens = self.token_file.tokens
        num_labels = self.token_file.num_tokens - 1
        for window, row in zip(windows, rows, strict=True):
            start = window * s
            count = min(s, max(0, num_labels - start))
            if count:
                # one token more than inputs: labels are the inputs shifted by one
                stream = read_tokens(start, start + count + 1)
                tokens[row, :count] = stream[:-1]
                labels[row, :count] = stream[1:]
            if count < s:
                tokens[row, count:], labels[row, count:] = 0, IGNORED_LABEL


def empty_rows(rows: int, sequence_length: int) -> tuple[Rows, Rows]:
    """Room for tokens and labels, `[rows, s]` each."""
    return np.empty((rows, sequence_length), np.int64), np.empty((rows, sequence_length), np.int64)


def rows_from(first: int, count: int, rank: int, size: int) -> range:
    """The rank's share of `count` rows, counted from the first row of the run.

    Raises `ValueError` if they do not divide, or the rank is not below size.
    """
    local_rows = share(count, rank, size)
    return range(first + local_rows.start, first + local_rows.stop)


def share(batch_size: int, rank: int, size: int) -> range:
    """The rank's rows of a batch; raises `ValueError` as `rows_from`."""
    if batch_size < 1 or size < 1 or batch_size % size:
        valid = [divisor for divisor in range(1, batch_size + 1) if batch_size % divisor == 0]
        raise ValueError(
            f"a batch of {batch_size} rows does not divide among {size} ranks; {valid} would do"
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} must lie between 0 and {size - 1}, size={size}")
    # consecutive rows: together the ranks hold the global batch in its order, however many they are
    rows = batch_size // size
    return range(rank * rows, (rank + 1) * rows)
