"""Parts of a token file, cut between documents: what to train on, to validate with, to test with."""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from core.datasets.token_file import Array, TokenFile

_SPLIT_NAMES = ("train", "valid", "test")


class TokenSource(Protocol):
    """Documents laid end to end: a full `TokenFile`, or a `TokenRange` of one."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents together."""
        ...

    @property
    def num_documents(self) -> int: ...

    def tokens(self, start: int, stop: int) -> Array:
        """Tokens start .. stop of the documents laid end to end: a read-only view; `ValueError` outside."""
        ...

    def document(self, number: int) -> Array:
        """The tokens of one document: a read-only view; `ValueError` if there is none."""
        ...

    def document_start(self, number: int) -> int:
        """The token at which a document begins; `num_documents` stands for the end."""
        ...

    @property
    def marks_answers(self) -> bool:
        """Whether it holds conversations."""
        ...

    @property
    def holds_preferences(self) -> bool:
        """Whether documents come in pairs, chosen and rejected."""
        ...

    def answers(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of `tokens(start, stop)` are answers'."""
        ...


@dataclass(frozen=True)
class TokenRange:
    """Documents first_document .. last_document (the last excluded) of a file, counted from 0 in this range.

    Raises `ValueError` if the file does not have them, or if its index is damaged at either end.
    """

    file: TokenFile
    first_document: int
    last_document: int
    first_token: int = field(init=False, repr=False)
    last_token: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        first = self.first_document
        last = self.last_document
        if not 0 <= first <= last <= self.file.num_documents:
            raise ValueError(
                f"documents {first} to {last} of {self.file.prefix}, which has {self.file.num_documents}"
            )
        # the way into a frozen dataclass; looked up once, because every read adds it
        object.__setattr__(self, "first_token", self.file.document_start(first))
        object.__setattr__(self, "last_token", self.file.document_start(last))
        if self.num_tokens < 0:
            raise ValueError(
                f"{self.file.prefix}.idx: document {first} begins at token {self.first_token}, document {last} at "
                f"{self.last_token}; write it again"
            )

    @property
    def num_documents(self) -> int:
        return self.last_document - self.first_document

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents together."""
        return self.last_token - self.first_token

    def tokens(self, start: int, stop: int) -> Array:
        """Tokens start .. stop of the range: a read-only view `[stop - start]`; raises `ValueError` outside."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(
                f"tokens {start} to {stop} of documents {self.first_document} to {self.last_document} of "
                f"{self.file.prefix}, which have {self.num_tokens}; ask for less"
            )
        return self.file.tokens(self.first_token + start, self.first_token + stop)

    def document(self, number: int) -> Array:
        """The tokens of one document: a read-only view `[length]`; raises `ValueError` if there is none."""
        if not 0 <= number < self.num_documents:
            raise ValueError(
                f"document {number} of a range of {self.num_documents} in {self.file.prefix}"
            )
        return self.file.document(self.first_document + number)

    def document_start(self, number: int) -> int:
        """The token of the range at which a document begins; `num_documents` stands for its end."""
        return self.file.document_start(self.first_document + number) - self.first_token

    @property
    def marks_answers(self) -> bool:
        """Whether the file says which of its tokens are answers."""
        return self.file.marks_answers

    @property
    def holds_preferences(self) -> bool:
        """Whether documents of the file come in pairs, chosen and rejected."""
        return self.file.holds_preferences

    def answers(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of `tokens(start, stop)` are answers'."""
        return self.file.answers(self.first_token + start, self.first_token + stop)


def first_documents(source: TokenSource, num_tokens: int) -> TokenRange:
    """As many whole documents from the beginning of a text as have at most `num_tokens` tokens, at least one."""
    if isinstance(source, TokenRange):
        file = source.file
        first = source.first_document
    else:
        assert isinstance(source, TokenFile)
        file = source
        first = 0
    # document n begins where the n before it end, and beginnings ascend
    count = bisect_right(range(1, source.num_documents), num_tokens, key=source.document_start)
    if source.holds_preferences:
        count = max(2, count - count % 2)
    return TokenRange(file, first, first + max(1, count))


def split_documents(
    file: TokenFile, split: str
) -> tuple[TokenRange | None, TokenRange | None, TokenRange | None]:
    """Train, valid and test part of a file, one behind the other, with tokens in the proportions of `split`.

    `split`: up to three numbers, "969,30,1". Each cut is at the document boundary that is nearest to the fraction of
    tokens; a part with a weight has at least one document, a part without is None. Costs O(log documents).
    Raises `ValueError` on a bad split, or if there are fewer documents than parts.
    """
    weights = _split_weights(split)
    requested = [weight > 0 for weight in weights]
    # a pair is not cut
    unit = 2 if file.holds_preferences else 1
    if file.num_documents < unit * sum(requested):
        # a conversation has no paragraphs to be cut at
        cut = "" if file.marks_answers else "prepare it with --documents paragraph, "
        raise ValueError(
            f"{file.prefix} has {file.num_documents} documents, split={split!r} asks for {sum(requested)} parts; "
            f"{cut}give validation files of their own, or split='1,0,0'"
        )
    ranges: list[TokenRange | None] = []
    first = 0
    for number, weight_so_far in enumerate(accumulate(weights)):
        if not requested[number]:
            ranges.append(None)
            continue
        # at least one document for this split, and for each that follows
        nearest = _nearest_boundary(file, weight_so_far / sum(weights))
        nearest -= nearest % unit
        end_limit = file.num_documents - unit * sum(requested[number + 1 :])
        end = min(max(nearest, first + unit), end_limit)
        ranges.append(TokenRange(file, first, end))
        first = end
    train, valid, test = ranges
    return train, valid, test


def _split_weights(split: str) -> list[float]:
    """Three numbers, not all 0."""
    try:
        weights = [float(text) for text in split.split(",")]
    except ValueError:
        weights = []
    if (
        not 1 <= len(weights) <= 3
        or not all(weight >= 0 for weight in weights)
        or not 0 < sum(weights) < float("inf")
    ):
        raise ValueError(
            f"split={split!r} must be one to three numbers for {', '.join(_SPLIT_NAMES)}, none negative, not all 0 "
            "and of finite sum; for example 969,30,1"
        )
    return weights + [0.0] * (3 - len(weights))


def _nearest_boundary(file: TokenFile, fraction: float) -> int:
    """The document whose beginning is nearest to the fraction of all tokens; the end counts as one more."""
    token = round(fraction * file.num_tokens)
    if token >= file.num_tokens:
        return file.num_documents
    # the token lies in this document: its beginning or that of the next one is nearest
    before = file.document_at(token)
    below = token - file.document_start(before)
    above = file.document_start(before + 1) - token
    if below <= above:
        return before
    return before + 1
