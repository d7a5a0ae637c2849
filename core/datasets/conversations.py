"""Batches of conversations, with loss on their answers only: whole ones packed into rows and kept apart; or pairs of
them, a chosen and a rejected answer to one prompt, a row each.

Legend: `b` rows in the global batch, `s` tokens in a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.datasets.batches import GPTBatches, Rows, empty_rows
from core.datasets.packing import IGNORED_LABEL, Packing
from core.datasets.token_file import Array


@dataclass(frozen=True, kw_only=True)
class ConversationBatches(GPTBatches):
    """Rows of `sequence_length` tokens, each of whole conversations, as many as fit in the order of the file.

    Positions and attention begin again in each; labels count where an answer is predicted. A conversation that is
    longer than a row loses its end (`truncated` counts them); one of whose answers nothing is left is passed over
    (`unanswered`). Which row comes when is a function of (seed, number),
    as in `GPTBatches`; `token_file` marks answers.
    Raises ValueError: a token file that does not; rows so short that nothing of any answer is left.
    """

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield self.sequence_length > 0, f"sequence_length={self.sequence_length} must be positive"
        yield (
            self.global_batch_size > 0,
            f"global_batch_size={self.global_batch_size} must be positive",
        )
        yield self.token_file.marks_answers, "a token file of text marks 0 answers; use GPTBatches"
        if self.sequence_length > 0 and self.token_file.marks_answers:
            count = self.token_file.num_documents
            yield (
                len(self.unanswered) < count or not count,
                f"sequence_length={self.sequence_length} leaves nothing of the answers of all {count} conversations: "
                "their prompts are longer; use longer rows, or shorter prompts",
            )

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
    def unanswered(self) -> list[int]:
        """Conversations that are so long that a row has nothing of their answers."""
        s = self.sequence_length
        numbers: list[int] = np.flatnonzero(self._lengths > s).tolist()
        starts = {number: self.token_file.document_start(number) for number in numbers}
        return [
            n
            for n, first in starts.items()
            if not self.token_file.answers(
                first + 1, min(first + s + 1, first + int(self._lengths[n]))
            ).any()
        ]

    @cached_property
    def _packed_lengths(self) -> Rows:
        """What a row takes of each conversation."""
        lengths = np.minimum(self._lengths, self.sequence_length)
        lengths[self.unanswered] = 0
        return lengths

    @cached_property
    def cut(self) -> tuple[int, int, int]:
        """(conversations of which answers are lost, those answers' tokens, the row that would lose none)."""
        # inputs of a row predict one more token than their first
        reach = self.sequence_length + 1
        conversations = tokens = longest = 0
        for number in np.flatnonzero(self._lengths > reach).tolist():
            first = self.token_file.document_start(number)
            stop = first + int(self._lengths[number])
            lost = int(self.token_file.answers(first + reach, stop).sum())
            if lost:
                conversations += 1
                tokens += lost
                longest = max(longest, stop - first - 1)
        return conversations, tokens, longest

    @cached_property
    def _first_documents(self) -> list[int]:
        """The first conversation of each row, and their number."""
        s = self.sequence_length
        firsts = []
        room = -1
        for number, length in enumerate(self._packed_lengths.tolist()):
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

    def _windows(self, windows: Sequence[int]) -> dict[str, Tensor]:
        """These rows of the epoch; beyond its end empty ones."""
        tokens, labels = empty_rows(len(windows), self.sequence_length)
        tokens[:] = 0
        labels[:] = IGNORED_LABEL
        begins = np.zeros_like(tokens)
        for row, number in enumerate(windows):
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
            length = int(self._packed_lengths[document])
            if not length:
                continue
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


@dataclass(frozen=True, kw_only=True)
class PreferenceBatches(GPTBatches):
    """Pairs of rows: row 2 i holds a prompt with its chosen response, row 2 i + 1 the same with the rejected one.

    `global_batch_size` and `num_samples` count pairs, so that no cut into microbatches of whole samples parts two.
    A batch of n pairs has int64 `tokens` and `labels` `[2 n, s]`, and `pair` `[2 n]`, the number of each row's pair
    in the file, -1 where there is none.
    Labels count where a response is predicted. A row that is too short loses the end of its response (`truncated`).
    Raises ValueError: a token file without pairs; rows so short that nothing of some responses is left.
    """

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield self.sequence_length > 0, f"sequence_length={self.sequence_length} must be positive"
        yield (
            self.global_batch_size > 0,
            f"global_batch_size={self.global_batch_size} must be positive",
        )
        yield self.token_file.holds_preferences, "a token file without pairs; use GPTBatches"
        if self.sequence_length > 0 and self.token_file.holds_preferences:
            lost = self._without_response
            yield (
                not lost,
                f"sequence_length={self.sequence_length} leaves nothing of {len(lost)} responses of "
                f"{self.token_file.num_documents}, the first in pair {(lost or [0])[0] // 2}: their prompts are "
                "longer; use longer rows, or shorter prompts",
            )

    @cached_property
    def _starts(self) -> list[int]:
        return [self.token_file.document_start(i) for i in range(self.token_file.num_documents + 1)]

    @cached_property
    def _longer(self) -> list[int]:
        """Documents of which the end is lost: a row of s inputs predicts s more tokens than its first."""
        lengths = np.diff(np.array(self._starts, np.int64))
        longer: list[int] = np.flatnonzero(lengths > self.sequence_length + 1).tolist()
        return longer

    @cached_property
    def _without_response(self) -> list[int]:
        return [number for number in self._longer if not self._document(number)[1].any()]

    @property
    def truncated(self) -> int:
        """Responses that lose their end."""
        return len(self._longer)

    @property
    def num_samples(self) -> int:
        """Number of pairs, which is the length of an epoch."""
        return self.token_file.num_documents // 2

    def _windows(self, windows: Sequence[int]) -> dict[str, Tensor]:
        numbers = [number if number < self.num_samples else -1 for number in windows]
        tokens, labels = empty_rows(2 * len(numbers), self.sequence_length)
        tokens[:] = 0
        labels[:] = IGNORED_LABEL
        for row, number in enumerate(numbers):
            for side in (0, 1) if number >= 0 else ():
                stream, learned = self._document(2 * number + side)
                inputs = min(len(stream), self.sequence_length)
                tokens[2 * row + side, :inputs] = stream[:inputs]
                labels[2 * row + side, : len(learned)] = np.where(
                    learned, stream[1:], IGNORED_LABEL
                )
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        return batch | {"pair": torch.tensor(numbers).repeat_interleave(2)}

    def _document(self, number: int) -> tuple[Array, npt.NDArray[np.bool_]]:
        """(the tokens of a row and the one after it, which of those behind the first are learned)."""
        first, stop = self._starts[number], self._starts[number + 1]
        stop = min(stop, first + self.sequence_length + 1)
        return self.token_file.tokens(first, stop), self.token_file.answers(first, stop)[1:]
