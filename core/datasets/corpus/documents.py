"""From bytes of the input to the tokens of its documents: the part of preparing that is worth a process of its own.

The reader cuts the input in pieces, a few pieces are a job, jobs go to any process, and their results are written in
the order of the jobs. All of it is a pure function of the input, so that the number of processes changes no byte.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.datasets.tokenizers.any_tokenizer import AnyTokenizer
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer

PIECE_BYTES = 1 << 20
_TOGETHER = 1 << 16  # bytes that are tokenised at a time: more is slower, and takes 100 bytes of memory for a token
PARAGRAPH_ENDS = (b"\n\n", b"\n\r\n")
_BLANK_LINES = re.compile(r"\r?\n(?:[ \t\r]*\n)+")

Ids = npt.NDArray[np.integer]


class TextPiece(NamedTuple):
    """Some of the input. kind: `file` (a document or a part of one: `first` and `last` say which end is there),
    `paragraph`, `line` (documents to be told apart), `jsonl` (whole lines), `texts` (a list of them).
    size: bytes on disk that it stands for, for the progress."""

    kind: str
    content: bytes | list[object]
    size: int = 0
    first: bool = True
    last: bool = True


class Encoded(NamedTuple):
    """The tokens of a job: documents laid end to end, their lengths, whether the first goes on with the last document
    of the job before, bytes of text, and how many pieces of the input were skipped for which reason."""

    tokens: Ids
    lengths: Ids
    continued: bool
    text_bytes: int
    skipped: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """How a job becomes tokens. end_of_text: what closes each document, None for nothing."""

    tokenizer: AnyTokenizer
    dtype: np.dtype
    end_of_text: int | None
    text_key: str

    def encode(self, job: Sequence[TextPiece]) -> Encoded:
        """The tokens of a job."""
        skipped: Counter[str] = Counter()
        texts: list[bytes] = []  # what is tokenised together: documents, or parts of them
        ends: list[bool] = []  # whether each of them ends its document
        continued = bool(job) and job[0].kind == "file" and not job[0].first
        for piece in job:
            for text, last in self._texts(piece, skipped):
                parts = list(cuts(text, PIECE_BYTES))
                texts += parts
                ends += [False] * (len(parts) - 1) + [last]
        tokens, counts = self._ids(texts, ends)
        closing = np.flatnonzero(ends)
        total = np.concatenate([[0], np.cumsum(counts)])
        bounds = np.concatenate([[0], closing + 1, [len(texts)] if texts and not ends[-1] else []]).astype(np.int64)
        lengths = np.diff(total[bounds]) if texts else np.zeros(0, np.int64)
        return Encoded(tokens, lengths, continued, sum(map(len, texts)), dict(skipped))

    def texts(self, piece: TextPiece) -> Iterator[bytes]:
        """The texts of a piece, UTF-8, without tokenising them."""
        return (text for text, _ in self._texts(piece, Counter()))

    def _ids(self, texts: list[bytes], ends: list[bool]) -> tuple[Ids, npt.NDArray[np.int64]]:
        """All tokens, and how many each text has, with the end of text where a document ends."""
        closing = [] if self.end_of_text is None else [self.end_of_text]
        if isinstance(self.tokenizer, ByteTokenizer):
            arrays = [np.frombuffer(text, np.uint8) for text in texts]
        else:
            arrays = [np.fromiter(ids, self.dtype, len(ids)) for ids in _encode(self.tokenizer, texts)]
        close, nothing = np.array(closing, self.dtype), np.zeros(0, self.dtype)
        pairs = chain.from_iterable(
            (ids.astype(self.dtype, copy=False), close if end else nothing)
            for ids, end in zip(arrays, ends, strict=True)
        )
        counts = [len(ids) + (len(closing) if end else 0) for ids, end in zip(arrays, ends, strict=True)]
        return np.concatenate([nothing, *pairs]), np.array(counts, np.int64)

    def _texts(self, piece: TextPiece, skipped: Counter[str]) -> Iterator[tuple[bytes, bool]]:
        """(UTF-8 text, whether it ends its document) of a piece."""
        if piece.kind == "file":
            assert isinstance(piece.content, bytes)
            yield piece.content, piece.last
            return
        for text in self._documents(piece, skipped):
            if not text.strip():
                skipped["empty documents"] += 1
                continue
            try:
                yield text.encode(), True
            except UnicodeEncodeError:  # a JSON string may hold half of a surrogate pair
                skipped["undecodable documents"] += 1

    def _documents(self, piece: TextPiece, skipped: Counter[str]) -> Iterator[str]:
        if isinstance(piece.content, list):
            for value in piece.content:
                if isinstance(value, str):
                    yield value
                else:
                    skipped[f"rows without a text {self.text_key!r}"] += 1
        elif piece.kind == "jsonl":
            yield from self._json_lines(piece.content, skipped)
        elif piece.kind == "line":
            # only at \n and \r\n, as an editor counts: str.splitlines knows eight more
            yield from (line.removesuffix("\r") for line in piece.content.decode().split("\n") if line.strip())
        else:
            # with blank lines at both ends, as in the middle: the result is the same wherever a piece was cut
            texts = _BLANK_LINES.split(f"\n\n{piece.content.decode()}\n\n")
            yield from (stripped for text in texts if (stripped := text.strip("\r\n")))

    def _json_lines(self, content: bytes, skipped: Counter[str]) -> Iterator[str]:
        for line in content.split(b"\n"):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except UnicodeDecodeError:
                skipped["undecodable lines"] += 1
            except (ValueError, RecursionError):
                skipped["lines that are no JSON"] += 1
            else:
                if isinstance(row, dict) and isinstance(row.get(self.text_key), str):
                    yield row[self.text_key]
                else:
                    skipped[f"rows without a text {self.text_key!r}"] += 1


def _encode(tokenizer: AnyTokenizer, texts: Sequence[bytes]) -> Iterator[list[int]]:
    """The ids of each text, a few texts at a time."""
    start = size = 0
    for i, text in enumerate(texts):
        size += len(text)
        if size >= _TOGETHER or i == len(texts) - 1:
            yield from tokenizer.encode_batch([text.decode() for text in texts[start : i + 1]])
            start, size = i + 1, 0


def cuts(content: bytes, limit: int, mode: str = "file") -> Iterator[bytes]:
    """`content`, UTF-8 text, in pieces of about `limit` bytes that can be tokenised one by one.

    mode `file`: behind a line end between two words, where byte-level tokenizers begin anew in any case, those of
    GPT-2's pattern and those of GPT-4's; without one, at another line end or between characters.
    `paragraph`: behind a blank line, `line`: behind a line end.
    """
    start = 0
    while len(content) - start > limit:
        stop = cut_place(content, start, start + limit, mode)
        yield content[start:stop]
        start = stop
    if start < len(content):
        yield content[start:]


def cut_place(content: bytes, start: int, stop: int, mode: str = "file") -> int:
    """A place to cut behind `start`: the last one up to `stop`, else the first one behind it, see `cuts`."""
    if mode == "file":
        return _between_words(content, start, stop)
    ends = PARAGRAPH_ENDS if mode == "paragraph" else (b"\n",)
    if (place := last_end(content, ends, start, stop)) > 0:
        return place
    place = len(content)
    for end in ends:
        found = content.find(end, stop - len(end) + 1, place)
        place = found + len(end) if found >= 0 else place
    return place


def last_end(content: bytes, ends: Sequence[bytes], start: int, stop: int) -> int:
    """Behind the last of the `ends` that lie between start and stop; 0 if there is none."""
    return max((place + len(end) for end in ends if (place := content.rfind(end, start, stop)) >= 0), default=0)


def _between_words(content: bytes, start: int, stop: int) -> int:
    other = -1
    place = content.rfind(b"\n", start, stop)
    while place > start:
        if content[place + 1 : place + 2].isalnum():
            if content[place - 1 : place].strip():
                return place + 1
            other = max(other, place + 1)
        place = content.rfind(b"\n", start, place)
    return other if other > 0 else _between_characters(content, start, stop)


def _between_characters(content: bytes, start: int, stop: int) -> int:
    while stop > start + 1 and content[stop] & 0xC0 == 0x80:  # inside of a character
        stop -= 1
    return stop
