"""Token files in Megatron's format: `.bin` holds the tokens, `.idx` where each document begins and ends.

`.idx`, little endian: magic (9 bytes), version u64, dtype code u8, number of sequences n u64, number of
document indices d u64, sequence lengths i32 [n], byte pointers into `.bin` i64 [n], document indices i64 [d]:
document i is made of sequences indices[i] .. indices[i+1], so d is the number of documents plus one.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from core.datasets.card import (
    FORMAT_PREFERENCES,
    MARKED,
    TokenCard,
    card_path,
    full_hash,
    read_card,
    remedy,
    sampled_hash,
)

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    code: np.dtype(name)
    for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"))
}
# 6 and 7 are floating point: no token ids
DTYPES[8] = np.dtype("<u2")
_REMEDY = "write it again with TokenFileWriter"
# entries of a table, or tokens, that `verify` reads at a time
_BLOCK = 1 << 20

Array = npt.NDArray[np.integer]


def _bin_alone(prefix: str) -> Path | None:
    """A .bin that is meant, with or without its ending, and has no .idx."""
    tokens, index = file_paths(prefix.removesuffix(".bin"))
    return tokens if tokens.is_file() and not index.is_file() else None


def file_paths(prefix: str | Path) -> tuple[Path, Path]:
    """The two files of a prefix: `prefix.bin` (tokens) and `prefix.idx` (documents)."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


class TokenFile:
    """The documents in `prefix.bin` and `prefix.idx`, memory mapped: opening costs the same at any size.

    Opening checks magic, version, dtype code and the exact length of both files against the header, and, if a card
    lies beside them (`card`, else None), sizes and sampled hashes against the card.
    Raises `ValueError` naming the file, what was expected and what was found; `FileNotFoundError`.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._bin_path, self._idx_path = file_paths(prefix)
        for path in (self._bin_path, self._idx_path):
            if not path.is_file():
                remedy = (
                    f"make it with `python -m core.datasets.prepare --input TEXT --output {prefix}`"
                )
                if alone := _bin_alone(self.prefix):
                    raise FileNotFoundError(
                        f"{alone} has no {alone.with_suffix('.idx').name} beside it: a token file is a .bin and an "
                        ".idx, of other programs (nanoGPT) a .bin holds token ids alone. Write them under another "
                        "name: with TokenFileWriter(PREFIX, vocab_size=N) as writer: writer.add_document("
                        f"numpy.memmap('{alone}', 'uint16'))"
                    )
                if self.prefix.endswith((".bin", ".idx")) and Path(prefix).is_file():
                    remedy = f"give {self.prefix[:-4]}, what their names begin with"
                elif Path(prefix).exists():
                    # a text, or a folder of texts
                    remedy = (
                        f"{prefix} itself is there, and not prepared: data.train={prefix} takes a text, or a folder "
                        f"of them, as it is; `python -m core.datasets.prepare --input {prefix} --output PREFIX` "
                        "makes a token file"
                    )
                elif Path(prefix).suffix and not any(map(Path.exists, file_paths(prefix))):
                    # the name of a text, which nobody prepares under its own name
                    raise FileNotFoundError(
                        f"{prefix} does not exist, and no prefix of prepared files, {path}, either; name one that "
                        "is there"
                    )
                raise FileNotFoundError(
                    f"{path} does not exist: a token file is a .bin and an .idx; {remedy}"
                )
        self.dtype, num_sequences, num_indices = self._read_header()
        index = _map(self._idx_path, np.dtype("u1"))
        ends = np.cumsum(
            [HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_indices]
        ).tolist()
        # offsets are odd, so these are unaligned views: numpy reads them correctly
        self._lengths = index[ends[0] : ends[1]].view("<i4")
        self._pointers = index[ends[1] : ends[2]].view("<i8")
        self._indices = index[ends[2] : ends[3]].view("<i8")
        self._check_lengths()
        # the card, where this package wrote the file, has hashes that Megatron's format lacks
        self.card: TokenCard | None = read_card(prefix)
        if self.card is not None:
            self._check_card(self.card)
        self._tokens = _map(self._bin_path, self.dtype)

    def _read_header(self) -> tuple[np.dtype, int, int]:
        path = self._idx_path
        size = path.stat().st_size
        if size < HEADER.size:
            raise ValueError(
                f"{path} has {size} bytes, its header alone has {HEADER.size}; {_REMEDY}"
            )
        with path.open("rb") as file:
            magic, version, code, sequences, indices = HEADER.unpack(file.read(HEADER.size))
        # each field by itself, so that the message says which one is wrong
        if magic != MAGIC:
            raise ValueError(
                f"{path} begins with {magic!r}, a token index with {MAGIC!r}; {_REMEDY}"
            )
        if version != VERSION:
            raise ValueError(
                f"{path} has version {version}, this reads version {VERSION}; {_REMEDY}"
            )
        if code not in DTYPES:
            raise ValueError(
                f"{path} has dtype code {code}, integers are {sorted(DTYPES)}; {_REMEDY}"
            )
        expected = HEADER.size + 12 * sequences + 8 * indices
        if size != expected:
            raise ValueError(
                f"{path} has {size} bytes, its header of {sequences} sequences and {indices} document "
                f"indices makes {expected}; {_REMEDY}"
            )
        return DTYPES[code], sequences, indices

    def _check_lengths(self) -> None:
        """Both ends of every table must meet; the middle is checked where it is read, see `document`."""
        span = None
        if self._indices.size:
            span = (int(self._indices[0]), int(self._indices[-1]))
        if span != (0, self._lengths.size):
            raise ValueError(
                f"{self._idx_path}: documents span sequences {span}, the file has 0 to "
                f"{self._lengths.size}; {_REMEDY}"
            )
        expected = 0
        if self._lengths.size:
            expected = self._end(self._lengths.size - 1)
        size = self._bin_path.stat().st_size
        if size != expected:
            raise ValueError(
                f"{self._bin_path} has {size} bytes, {self._idx_path.name} says {expected}; {_REMEDY}"
            )

    def _check_card(self, card: TokenCard) -> None:
        problems = []
        for path, expected_size, expected_hash in (
            (self._bin_path, card.bin_bytes, card.bin_hash),
            (self._idx_path, card.idx_bytes, card.idx_hash),
        ):
            size = path.stat().st_size
            if size != expected_size:
                problems.append(f"{path} has {size} bytes, its card says {expected_size}")
                continue
            actual_hash = sampled_hash(path)
            if actual_hash != expected_hash:
                problems.append(
                    f"{path} was changed: its sampled hash is {actual_hash[:12]}, its card says {expected_hash[:12]}"
                )
        if problems:
            raise ValueError(
                f"{'; '.join(problems)} ({card_path(self.prefix)}); {remedy(self.prefix)}"
            )

    def _end(self, sequence: int) -> int:
        """The byte after the sequence."""
        return int(self._pointers[sequence]) + int(self._lengths[sequence]) * self.dtype.itemsize

    @property
    def num_documents(self) -> int:
        return self._indices.size - 1

    @property
    def num_sequences(self) -> int:
        """Number of sequences: in Megatron's format a document is made of one or several."""
        return self._lengths.size

    @property
    def sequence_lengths(self) -> Array:
        """Tokens of every sequence, int32 `[num_sequences]`, a view of the file."""
        return self._lengths

    @property
    def document_indices(self) -> Array:
        """The sequence at which every document begins, and their end: int64 `[num_documents + 1]`, a view."""
        return self._indices

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents together."""
        return self._tokens.size

    def tokens(self, start: int, stop: int) -> Array:
        """Tokens start .. stop of all documents laid end to end: a read-only view `[stop - start]`.

        Raises `ValueError` outside the file.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(
                f"tokens {start} to {stop} of {self._bin_path}, which has {self.num_tokens}; ask for less"
            )
        return self._plain(self._tokens[start:stop])

    @property
    def marks_answers(self) -> bool:
        """Whether it holds conversations: which tokens are answers' is known."""
        return self.card is not None and self.card.format in MARKED

    @property
    def holds_preferences(self) -> bool:
        """Whether documents 2 i and 2 i + 1 are the chosen and the rejected response to one prompt."""
        return self.card is not None and self.card.format == FORMAT_PREFERENCES

    def answers(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of `tokens(start, stop)` are answers'; all of them in a file that marks none."""
        size = self.tokens(start, stop).size
        if self.marks_answers:
            return self._tokens[start:stop] < 0
        return np.ones(size, np.bool_)

    def _plain(self, stored: Array) -> Array:
        """Tokens without their marks."""
        if self.marks_answers:
            return np.where(stored < 0, ~stored, stored)
        return stored

    def document(self, number: int) -> Array:
        """The tokens of one document: a read-only view `[length]`.

        Raises `ValueError` if there is no such document, or if the index is damaged there.
        """
        if not 0 <= number < self.num_documents:
            raise ValueError(
                f"document {number} of {self._idx_path}, which has {self.num_documents}; ask for less"
            )
        first, last = self._indices[number : number + 2].tolist()
        if not 0 <= first <= last <= self._lengths.size:
            raise ValueError(
                f"{self._idx_path}: document {number} spans sequences {first} to {last} of "
                f"{self._lengths.size}; {_REMEDY}"
            )
        starts = [self._start(sequence) for sequence in range(first, last + 1)]
        ends = [self._end(sequence) for sequence in range(first, last)]
        # each sequence must end where the next one starts: so the document is one stretch of the file
        inside = starts[0] >= 0 and starts[-1] <= self._tokens.nbytes
        itemsize = self.dtype.itemsize
        if not inside or starts[1:] != ends or starts != sorted(starts) or starts[0] % itemsize:
            raise ValueError(
                f"{self._idx_path}: the sequences of document {number} begin at bytes {starts}, "
                f"their lengths end them at {ends}; {_REMEDY}"
            )
        return self._plain(self._tokens[starts[0] // itemsize : starts[-1] // itemsize])

    def _start(self, sequence: int) -> int:
        """The first byte of the sequence; the end of the file counts as one sequence more."""
        if sequence < self._lengths.size:
            return int(self._pointers[sequence])
        return self._tokens.nbytes

    def document_start(self, number: int) -> int:
        """The token at which a document begins; `num_documents` stands for the end of the file.

        Raises `ValueError` if there is no such document, or if the index is damaged there.
        """
        if not 0 <= number <= self.num_documents:
            raise ValueError(
                f"document {number} of {self._idx_path}, which has {self.num_documents}; ask for less"
            )
        sequence = int(self._indices[number])
        start = self._start(sequence) if sequence >= 0 else -1
        if not 0 <= start <= self._tokens.nbytes or start % self.dtype.itemsize:
            raise ValueError(
                f"{self._idx_path}: document {number} begins with sequence {sequence} at byte {start} of "
                f"{self._tokens.nbytes}; {_REMEDY}"
            )
        return start // self.dtype.itemsize

    def document_at(self, token: int) -> int:
        """The document that holds token number `token`, by bisection: O(log documents), nothing is built.

        Raises `ValueError` outside the file, or if the index is damaged.
        """
        if not 0 <= token < self.num_tokens:
            raise ValueError(
                f"token {token} of {self._bin_path}, which has {self.num_tokens}; ask for less"
            )
        # over the documents' first tokens, each computed when the bisection asks for it
        return bisect_right(range(self.num_documents), token, key=self.document_start) - 1

    def verify(self) -> None:
        """Read every byte: both tables and all tokens, against the header and, if there is one, against the card.

        Raises `ValueError` naming what differs.
        """
        self._verify_tables()
        if self.card is None:
            return
        for path, expected in (
            (self._bin_path, self.card.bin_sha256),
            (self._idx_path, self.card.idx_sha256),
        ):
            actual = full_hash(path)
            if actual != expected:
                raise ValueError(
                    f"{path}: the hash of all its bytes is {actual[:12]}, {card_path(self.prefix)} says "
                    f"{expected[:12]}; {remedy(self.prefix)}"
                )
        self._verify_numbers(self.card)

    def _verify_numbers(self, card: TokenCard) -> None:
        """The hashes of the files say nothing about the rest of the card."""
        pairs = (
            ("dtype", card.dtype, str(self.dtype)),
            ("documents", card.documents, self.num_documents),
            ("tokens", card.tokens, self.num_tokens),
        )
        problems = []
        for name, card_value, file_value in pairs:
            if card_value != file_value:
                problems.append(f"{name}: the card says {card_value}, the files {file_value}")
        smallest, largest = self.smallest_and_largest(range(0, self.num_tokens, _BLOCK), _BLOCK)
        if smallest < 0 or largest >= card.vocab_size:
            problems.append(
                f"vocab_size: the card says {card.vocab_size}, the files hold tokens {smallest} to {largest}"
            )
        if problems:
            raise ValueError(
                f"{self._bin_path}: {'; '.join(problems)} ({card_path(self.prefix)}); {remedy(self.prefix)}"
            )

    def smallest_and_largest(self, starts: Iterable[int], length: int) -> tuple[int, int]:
        """Of the tokens in blocks of `length` at `starts`, one block at a time; (0, 0) of none."""
        minima = []
        maxima = []
        for start in starts:
            block = self._plain(self._tokens[start : start + length])
            if block.size:
                minima.append(int(block.min()))
                maxima.append(int(block.max()))
        return min(minima, default=0), max(maxima, default=0)

    def _verify_tables(self) -> None:
        """Sequences must lie one behind the other, and documents be runs of sequences."""
        previous_end = 0  # in bytes
        for first in range(0, self.num_sequences, _BLOCK):
            lengths = self._lengths[first : first + _BLOCK].astype(np.int64)
            ends = previous_end + np.cumsum(lengths) * self.dtype.itemsize
            pointers = self._pointers[first : first + _BLOCK]
            wrong = (pointers != ends - lengths * self.dtype.itemsize) | (lengths < 0)
            if wrong.any():
                i = int(wrong.argmax())
                raise ValueError(
                    f"{self._idx_path}: sequence {first + i} of {lengths[i]} tokens begins at byte {pointers[i]}, "
                    f"its predecessors end elsewhere; {_REMEDY}"
                )
            previous_end = int(ends[-1])
        for first in range(0, self.num_documents, _BLOCK):
            indices = self._indices[first : first + _BLOCK + 1]
            if (wrong := np.diff(indices) < 0).any():
                i = int(wrong.argmax())
                raise ValueError(
                    f"{self._idx_path}: document {first + i} spans sequences {indices[i]} to {indices[i + 1]}; "
                    f"{_REMEDY}"
                )


def _map(path: Path, dtype: np.dtype) -> Array:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r").view(np.ndarray)
