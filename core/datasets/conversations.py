"""Batches of conversations: whole ones packed into rows, kept apart, with loss on their answers only.

Legend: `b` rows in the global batch, `s` tokens in a row.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from core.datasets.batches import GPTBatches, Rows, empty_rows, rows_from
from core.datasets.order import draws
from core.datasets.packing import IGNORED_LABEL, Packing


@dataclass(frozen=True, kw_only=True)
class ConversationBatches(GPTBatches):
    """Rows of `sequence_length` tokens, each of whole conversations, as many as fit in the order of the file.

    Positions and attention begin again in each; labels count where an answer is predicted. A conversation that is
    longer than a row loses its end (`truncated` counts them). Which row comes when is a function of (seed, number),
    as in `GPTBatches`; `token_file` marks answers.
    Raises ValueError: a token file that does not.
    """

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield self.sequence_length > 0, f"sequence_length={self.sequence_length} must be positive"
        yield (
            self.global_batch_size > 0,
            f"global_batch_size={self.global_batch_size} must be positive",
        )
        yield self.token_file.marks_answers, "a token file of text marks 0 answers; use GPTBatches"

    @cached_property
    def packing(self) -> Packing:
        """Conversations are kept apart, whatever the options say."""
        return Packing(
            end_of_text=self.end_of_text, reset_position_ids=True, reset_attention_mask=True
        )

    @cached_property
    def _lengths(self) -> Rows:
        starts: list[int] = [
            self.token_file.document_start(i) for i in range(self.token_file.num_documents + 1)
        ]
        boundaries = np.array(starts, np.int64)
        return boundaries[1:] - boundaries[:-1]

    @property
    def truncated(self) -> int:
        """Conversations that are longer than a row."""
        return int((self._lengths > self.sequence_length).sum())

    @cached_property
    def _first_documents(self) -> list[int]:
        """The first conversation of each row, and their number."""
        s = self.sequence_length
        firsts = []
        room = 0
        for number, length in enumerate(np.minimum(self._lengths, s).tolist()):
            # rows keep the order of the file: no row is filled up with a later conversation
            if length > room:
                firsts.append(number)
                room = s
            room -= length
        return [*firsts, len(self._lengths)]

    @property
    def num_samples(self) -> int:
        """Number of rows, which is the length of an epoch."""
        return len(self._first_documents) - 1

    def rows(self, first: int, count: int, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
        """The rows of the run from number `first` on, as `GPTBatches.rows`."""
        drawn = rows_from(first, count, rank, size)
        return self._batch(
            draws(drawn.start, drawn.stop, self.num_samples, seed=self.seed).tolist()
        )

    def _windows(self, windows: range) -> dict[str, Tensor]:
        return self._batch(windows)

    def _batch(self, windows: Iterable[int]) -> dict[str, Tensor]:
        """These rows of the epoch; beyond its end empty ones."""
        numbers = list(windows)
        tokens, labels = empty_rows(len(numbers), self.sequence_length)
        tokens[:] = 0
        labels[:] = IGNORED_LABEL
        begins = np.zeros_like(tokens)
        for row, number in enumerate(numbers):
            if number < self.num_samples:
                self._fill_row(number, tokens[row], labels[row], begins[row])
        return self.packing.batch(
            torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(begins)
        )

    def _fill_row(self, number: int, tokens: Rows, labels: Rows, begins: Rows) -> None:
        """One row `[s]`; what is left at its end is a document of its own, without labels."""
        source = self.token_file
        start = 0
        for document in range(*self._first_documents[number : number + 2]):
            length = min(int(self._lengths[document]), self.sequence_length)
            first = source.document_start(document)
            stop = first + int(self._lengths[document])
            # one token more than inputs, where there is one: labels are the inputs shifted by one
            stream = source.tokens(first, min(stop, first + length + 1))
            learned = source.answers(first, min(stop, first + length + 1))[1:]
            tokens[start : start + length] = stream[:length]
            labels[start : start + len(learned)] = np.where(learned, stream[1:], IGNORED_LABEL)
            begins[start : start + length] = start
            start += length
        begins[start:] = start

    def answer_tokens(self, rows: int | None = None) -> Rows:
        """The tokens that are labels in the first `rows` rows of the file (None: in all)."""
        numbers = range(self.num_samples if rows is None else min(rows, self.num_samples))
        labels = self._windows(numbers)["labels"]
        return labels[labels != IGNORED_LABEL].numpy()
