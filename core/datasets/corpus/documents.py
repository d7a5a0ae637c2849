"""From bytes of the input to the tokens of its documents: the part of preparing that is worth a process of its own.

The reader cuts the input in chunks, a few chunks are a job, jobs go to any process, and their results are written in
the order of the jobs. All of it is a pure function of the input, so that the number of processes changes no byte.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.datasets.tokenizers.any_tokenizer import AnyTokenizer
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer

CHUNK_BYTES = 1 << 20
# tokenised at a time: more is slower, and takes 100 bytes of memory for a token
_BATCH_BYTES = 1 << 16
PARAGRAPH_ENDS = (b"\n\n", b"\n\r\n")
_BLANK_LINES = re.compile(r"\r?\n(?:[ \t\r]*\n)+")

Ids = npt.NDArray[np.integer]


class TextChunk(NamedTuple):
    """Some of the input.

    kind: `file` (a document or a part of one: `first` and `last` say which end of it is in the chunk), `paragraph`,
    `line` (documents that are still to be told apart), `jsonl` (complete lines), `texts` (a list of them).
    size: bytes on disk that it stands for, for the progress.
    """

    kind: str
    content: bytes | list[object]
    size: int = 0
    first: bool = True
    last: bool = True


class Encoded(NamedTuple):
    """The tokens of a job.

    tokens: of all documents laid end to end. lengths: of each document. continued: whether the first goes on with the
    last document of the job before. text_bytes: of text. skipped: reason -> how much of the input was skipped for it.
    spelt: special token -> how many texts spell it out, and keep it as text.
    """

    tokens: Ids
    lengths: Ids
    continued: bool
    text_bytes: int
    skipped: dict[str, int]
    spelt: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """How a job becomes tokens. end_of_text: what closes each document, None for nothing."""

    tokenizer: AnyTokenizer
    dtype: np.dtype
    end_of_text: int | None
    text_key: str

    def encode(self, job: Sequence[TextChunk]) -> Encoded:
        """The tokens of a job."""
        skipped: Counter[str] = Counter()
        # large texts are cut where tokenizers begin anew, so that memory stays bounded and the tokens are the same
        texts: list[bytes] = []  # what is tokenised at once: documents, or parts of large ones
        # whether each of them ends its document
        ends: list[bool] = []
        continued = bool(job) and job[0].kind == "file" and not job[0].first
        for chunk in job:
            for text, is_last in self._texts(chunk, skipped):
                sections = list(cuts(text, CHUNK_BYTES))
                texts += sections
                ends += [False] * (len(sections) - 1) + [is_last]
        tokens, counts = self._ids_and_lengths(texts, ends, continued=continued)
        lengths = _document_lengths(counts, ends)
        size = sum(map(len, texts))
        return Encoded(tokens, lengths, continued, size, dict(skipped), self._spelt(texts))

    def _spelt(self, texts: Sequence[bytes]) -> dict[str, int]:
        specials = self.tokenizer.special_texts
        if not specials:
            return {}
        pattern = re.compile(b"|".join(re.escape(text.encode()) for text in specials))
        found = (pattern.search(text) for text in texts)
        return dict(Counter(match[0].decode() for match in found if match))

    def texts(self, chunk: TextChunk) -> Iterator[bytes]:
        """The texts of a chunk, UTF-8, without tokenising them."""
        return (text for text, _ in self._texts(chunk, Counter()))

    def _ids_and_lengths(
        self, texts: list[bytes], ends: list[bool], *, continued: bool
    ) -> tuple[Ids, npt.NDArray[np.int64]]:
        """All tokens, and how many each text has, with what opens and closes a document.

        continued: the first text goes on with a document.
        """
        arrays: list[Ids]
        if isinstance(self.tokenizer, ByteTokenizer):
            # tokens are the bytes: no library, and no list of Python integers
            arrays = [
                np.frombuffer(text, np.uint8).astype(self.dtype, copy=False) for text in texts
            ]
        else:
            arrays = [
                np.fromiter(ids, self.dtype, len(ids)) for ids in _encode(self.tokenizer, texts)
            ]
        opening = np.array(self.tokenizer.starts, self.dtype)
        closing = np.array([] if self.end_of_text is None else [self.end_of_text], self.dtype)
        # so that there is one to concatenate
        sections: list[Ids] = [np.zeros(0, self.dtype)]
        counts = []
        begins_document = not continued
        for ids, ends_document in zip(arrays, ends, strict=True):
            count = len(ids)
            if begins_document:
                sections.append(opening)
                count += len(opening)
            sections.append(ids)
            begins_document = ends_document
            if ends_document:
                sections.append(closing)
                count += len(closing)
            counts.append(count)
        return np.concatenate(sections), np.array(counts, np.int64)

    def _texts(self, chunk: TextChunk, skipped: Counter[str]) -> Iterator[tuple[bytes, bool]]:
        """(UTF-8 text, whether it ends its document) of a chunk."""
        if chunk.kind == "file":
            assert isinstance(chunk.content, bytes)
            yield chunk.content, chunk.last
            return
        for text in self._documents(chunk, skipped):
            if not text.strip():
                skipped["empty documents"] += 1
                continue
            try:
                yield text.encode(), True
            except UnicodeEncodeError:
                # a JSON string may hold half of a surrogate pair
                skipped["undecodable documents"] += 1

    def _documents(self, chunk: TextChunk, skipped: Counter[str]) -> Iterator[str]:
        if isinstance(chunk.content, list):
            for value in chunk.content:
                if isinstance(value, str):
                    yield value
                else:
                    skipped[f"rows without a text {self.text_key!r}"] += 1
        elif chunk.kind == "jsonl":
            yield from self._json_lines(chunk.content, skipped)
        elif chunk.kind == "line":
            # only at \n and \r\n, as an editor counts: str.splitlines knows eight more
            for line in chunk.content.decode().split("\n"):
                if line.strip():
                    yield line.removesuffix("\r")
        else:
            # with blank lines at both ends, as in the middle: the result is the same wherever a chunk was cut
            for text in _BLANK_LINES.split(f"\n\n{chunk.content.decode()}\n\n"):
                if paragraph := text.strip("\r\n"):
                    yield paragraph

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


def _document_lengths(counts: npt.NDArray[np.int64], ends: list[bool]) -> npt.NDArray[np.int64]:
    """Tokens of each document, from the tokens of each text; the last document may be without its end."""
    if not ends:
        return np.zeros(0, np.int64)
    # the tokens before each text, and of all
    tokens_before = np.concatenate([[0], np.cumsum(counts)])
    boundaries = [0, *(np.flatnonzero(ends) + 1).tolist()]
    if not ends[-1]:
        boundaries.append(len(ends))
    return np.diff(tokens_before[boundaries])


def _encode(tokenizer: AnyTokenizer, texts: Sequence[bytes]) -> Iterator[list[int]]:
    """The ids of each text, a few texts at a time."""
    start = size = 0
    for i, text in enumerate(texts):
        size += len(text)
        if size >= _BATCH_BYTES or i == len(texts) - 1:
            yield from tokenizer.encode_batch([text.decode() for text in texts[start : i + 1]])
            start = i + 1
            size = 0


def cuts(content: bytes, limit: int, mode: str = "file") -> Iterator[bytes]:
    """`content`, UTF-8 text, in sections of about `limit` bytes that can be tokenised one by one.

    mode `file`: behind a line end between two words, where byte-level tokenizers begin anew in any case, those of
    GPT-2's pattern and those of GPT-4's; without one, at another line end or between characters.
    `paragraph`: behind a blank line, `line`: behind a line end.
    """
    start = 0
    while len(content) - start > limit:
        stop = cut_position(content, start, start + limit, mode)
        yield content[start:stop]
        start = stop
    if start < len(content):
        yield content[start:]


def cut_position(content: bytes, start: int, stop: int, mode: str = "file") -> int:
    """Where to cut behind `start`: the last possible position up to `stop`, else the first behind it, see `cuts`."""
    if mode == "file":
        return _between_words(content, start, stop)
    ends = PARAGRAPH_ENDS if mode == "paragraph" else (b"\n",)
    position = last_end(content, ends, start, stop)
    if position > 0:
        return position
    position = len(content)
    for end in ends:
        next_end = content.find(end, stop - len(end) + 1, position)
        if next_end >= 0:
            position = next_end + len(end)
    return position


def last_end(content: bytes, ends: Sequence[bytes], start: int, stop: int) -> int:
    """Behind the last of the `ends` that lie between start and stop; 0 if there is none."""
    positions = [0]
    for end in ends:
        last = content.rfind(end, start, stop)
        if last >= 0:
            positions.append(last + len(end))
    return max(positions)


def _between_words(content: bytes, start: int, stop: int) -> int:
    """Behind the last line end between a character that is no space and a letter or digit.

    Otherwise behind the last line end before a letter or digit, otherwise between two characters.
    """
    second_best = -1
    line_end = content.rfind(b"\n", start, stop)
    while line_end > start:
        if content[line_end + 1 : line_end + 2].isalnum():
            if content[line_end - 1 : line_end].strip():
                return line_end + 1
            second_best = max(second_best, line_end + 1)
        line_end = content.rfind(b"\n", start, line_end)
    if second_best > 0:
        return second_best
    return _between_characters(content, start, stop)


def _between_characters(content: bytes, start: int, stop: int) -> int:
    # inside of a character: UTF-8's continuation bytes
    while stop > start + 1 and content[stop] & 0xC0 == 0x80:
        stop -= 1
    return stop
