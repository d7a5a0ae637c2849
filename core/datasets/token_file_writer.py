"""Writes token files that appear whole or not at all, in the format that `token_file` describes."""

import contextlib
import filecmp
import hashlib
import os
import re
import warnings
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from core.datasets.card import (
    FORMAT,
    FORMAT_ANSWERS,
    FORMAT_PREFERENCES,
    TokenCard,
    card_path,
    has_card,
    kept_tokenizer_path,
    read_card,
    sampled_hash,
    tokenizer_path,
)
from core.datasets.prefix_lock import release_lock, take_lock
from core.datasets.token_file import DTYPES, HEADER, MAGIC, VERSION, Array, file_paths
from core.datasets.tokenizers.any_tokenizer import AnyTokenizer
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_BLOCK = 1 << 20  # entries of a table that are written at a time
# tokens of one sequence, in a table of i32
_MAX_LENGTH = 2**31 - 1


class TokenFileWriter:
    """Writes documents to `prefix.bin` and `prefix.idx`; both appear when the `with` block ends well.

    Until then they carry temporary names, so an interrupted run leaves nothing that opens, and a file that
    was there before stays. One writer at a time has the prefix, from the beginning of the block to its end, where
    the file system has locks. The dtype is uint16 where `vocab_size` ids fit, else int32; `dtype` overrides it.
    With a `tokenizer` its copy and a card are written beside them; `end_of_text` and `sources` are for the card, as
    are the counts `text_bytes` and `skipped`, which the caller adds to. marks_answers: for `add_conversation`;
    in_pairs: so added, a chosen response and then the rejected one.
    Raises `ValueError` if the vocabulary is larger than the dtype, or if the card would replace a foreign file; at
    the beginning of the block, if another process writes the same prefix.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        vocab_size: int,
        dtype: npt.DTypeLike | None = None,
        tokenizer: AnyTokenizer | None = None,
        end_of_text: int | None = None,
        sources: Sequence[str] = (),
        marks_answers: bool = False,
        in_pairs: bool = False,
    ) -> None:
        if marks_answers or in_pairs:  # the sign is the mark
            dtype = "<i4"
        if dtype is None:
            dtype = "<u2" if vocab_size <= 2**16 else "<i4"
        self.dtype = np.dtype(dtype)
        if self.dtype not in _CODES:
            raise ValueError(
                f"dtype {self.dtype} is none of {sorted(map(str, _CODES))}; use uint16 or int32"
            )
        largest = int(np.iinfo(self.dtype).max)
        if not 0 < vocab_size <= largest + 1:
            raise ValueError(
                f"vocab_size={vocab_size}, but {self.dtype} holds 1 to {largest + 1} ids; use a larger dtype"
            )
        if tokenizer is not None and card_path(prefix).exists() and not has_card(prefix):
            raise ValueError(
                f"{card_path(prefix)} exists and is no card of a token file; choose another prefix, or move it away"
            )
        _refuse_foreign(prefix, has_card_after=tokenizer is not None)
        self.vocab_size = vocab_size
        self.text_bytes = 0
        self.skipped: Counter[str] = Counter()
        self._prefix = prefix
        self._tokenizer = tokenizer
        self._sources = tuple(sources)
        self._end_of_text = end_of_text
        self._format = FORMAT_ANSWERS if marks_answers else FORMAT
        if in_pairs:
            self._format = FORMAT_PREFERENCES
        # .idx last: without it nothing opens
        self._paths = (
            file_paths(prefix)[0],
            tokenizer_path(prefix),
            card_path(prefix),
            file_paths(prefix)[1],
        )
        self._temporary = _temporary(self._paths, os.getpid())
        self._lengths = array("i")
        self._num_tokens = 0

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens added so far."""
        return self._num_tokens

    def __enter__(self) -> "TokenFileWriter":
        self._lengths = array("i")
        self._num_tokens = 0
        self._digest = hashlib.sha256()
        Path(self._prefix).parent.mkdir(parents=True, exist_ok=True)
        self._lock = take_lock(self._prefix)
        try:
            # without locks another writer may be alive: its temporary files stay
            if self._lock is not None:
                _remove_abandoned(self._paths)
            self._file = self._temporary[0].open("wb")
        except BaseException:
            release_lock(self._prefix, self._lock)
            raise
        return self

    def add_document(self, tokens: Sequence[int] | Array) -> None:
        """Append one document, `[length]`; raises `ValueError` on an id outside the vocabulary."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(
                f"document {len(self._lengths)} is {ids.dtype} of shape {list(ids.shape)}; "
                "give integers of shape [length]"
            )
        self.add_documents(ids, [ids.size])

    def add_conversation(self, tokens: Array, answers: npt.NDArray[np.bool_]) -> None:
        """Append one document `[length]` of which `answers` `[length]` are to be learned; with `marks_answers` only.

        Raises `ValueError` on an id outside the vocabulary.
        """
        self._check_ids(tokens)
        self._write(np.where(answers, ~tokens, tokens), [tokens.size], continued=False)

    def add_documents(
        self, tokens: Array, lengths: Iterable[int], *, continued: bool = False
    ) -> None:
        """Append documents laid end to end: `tokens` of any integer dtype, `[sum of lengths]`.

        `continued`: the first of them goes on with the document that was added last.
        Raises `ValueError` on an id outside the vocabulary, or a document of 2^31 tokens or more.
        """
        self._check_ids(tokens)
        self._write(tokens, list(lengths), continued=continued)

    def _check_ids(self, tokens: Array) -> None:
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            raise ValueError(
                f"document {len(self._lengths)} has tokens {tokens.min()} to {tokens.max()}, "
                f"vocab_size={self.vocab_size} allows 0 to {self.vocab_size - 1}; "
                "use the tokenizer of this size"
            )

    def _write(self, tokens: Array, added: list[int], *, continued: bool) -> None:
        # the document was cut between two jobs of the preparation
        if continued:
            added[0] += self._lengths.pop()
        if added and max(added) > _MAX_LENGTH:
            raise ValueError(
                f"a document of {max(added)} tokens, the format allows {_MAX_LENGTH}; cut it in parts"
            )
        # hashed while it is written: the file need not be read again for its card
        content = tokens.astype(self.dtype, copy=False).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._lengths.extend(added)
        self._num_tokens += tokens.size

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                with self._file:
                    _flush(self._file)
                    self._commit()
        finally:
            # what is buffered may no longer fit
            with contextlib.suppress(OSError):
                self._file.close()
            for path in self._temporary:
                path.unlink(missing_ok=True)
            release_lock(self._prefix, self._lock)

    def _commit(self) -> None:
        idx_sha256 = self._write_index(self._temporary[3])
        written = [0, 3]  # numbers in `_paths`: .bin and .idx
        if self._tokenizer is not None:
            if not isinstance(self._tokenizer, ByteTokenizer):
                self._tokenizer.save(self._temporary[1])
                written.append(1)
            self._temporary[2].write_bytes(self._card(self._tokenizer, idx_sha256).to_json())
            written.append(2)
        for number in written[1:]:
            with self._temporary[number].open("rb") as file:
                os.fsync(file.fileno())
        # The commit, in an order that leaves no mixture of two files at any moment.
        # An old index must not survive beside new tokens: without .idx nothing opens, so it goes first
        # and its successor comes last.
        self._paths[3].unlink(missing_ok=True)
        # the card and tokenizer of an earlier file do not describe this one
        inherited = has_card(self._prefix)
        if inherited:
            self._keep_earlier_tokenizer()
        try:
            for number, (temporary, path) in enumerate(
                zip(self._temporary, self._paths, strict=True)
            ):
                if number in written:
                    temporary.replace(path)
                elif inherited:
                    path.unlink(missing_ok=True)
        except BaseException:
            # without .idx it would be taken for another program's
            self._paths[0].unlink(missing_ok=True)
            raise
        _sync_directory(self._paths[3].parent)

    def _keep_earlier_tokenizer(self) -> None:
        """Runs of the text that was here need it: it is moved aside, and told, unless the same one comes."""
        earlier, new = self._paths[1], self._temporary[1]
        if not earlier.is_file() or (new.is_file() and filecmp.cmp(earlier, new, shallow=False)):
            return
        try:
            card = read_card(self._prefix)
        except ValueError:  # damaged
            card = None
        identity = card.tokenizer if card is not None else f"before-{os.getpid()}"
        kept = kept_tokenizer_path(earlier, identity)
        earlier.replace(kept)
        warnings.warn(
            f"{self._prefix} was a text of another tokenizer, {identity[:12]}: that is kept as {kept}, where runs "
            "that were trained on it find it; give another output to keep the text, too",
            stacklevel=2,
        )

    def _card(self, tokenizer: AnyTokenizer, idx_sha256: str) -> TokenCard:
        return TokenCard(
            format=self._format,
            dtype=str(self.dtype),
            documents=len(self._lengths),
            tokens=self._num_tokens,
            text_bytes=self.text_bytes,
            skipped=dict(self.skipped),
            vocab_size=self.vocab_size,
            end_of_text=self._end_of_text,
            tokenizer=tokenizer.identity,
            sources=self._sources,
            idx_bytes=self._temporary[3].stat().st_size,
            bin_bytes=self._temporary[0].stat().st_size,
            idx_hash=sampled_hash(self._temporary[3]),
            bin_hash=sampled_hash(self._temporary[0]),
            bin_sha256=self._digest.hexdigest(),
            idx_sha256=idx_sha256,
        )

    def _write_index(self, path: Path) -> str:
        """The `.idx`, a block of a table at a time; returns the hash of its bytes."""
        if self._lengths:
            lengths = np.frombuffer(self._lengths, "i4")
        else:
            lengths = np.zeros(0, "i4")
        count = lengths.size
        digest = hashlib.sha256()
        with path.open("wb") as file:

            def put(content: bytes) -> None:
                file.write(content)
                digest.update(content)

            put(HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], count, count + 1))
            blocks = [lengths[first : first + _BLOCK] for first in range(0, count, _BLOCK)]
            # lengths of the sequences: each document is one
            for block in blocks:
                put(block.astype("<i4").tobytes())
            # the byte at which each begins
            start = 0
            for block in blocks:
                ends = start + np.cumsum(block, dtype="<i8") * self.dtype.itemsize
                put(np.concatenate([np.array([start], "<i8"), ends[:-1]]).astype("<i8").tobytes())
                start = int(ends[-1])
            # the sequence at which each document begins: 0, 1, 2, ...
            for first in range(0, count + 1, _BLOCK):
                put(np.arange(first, min(count + 1, first + _BLOCK), dtype="<i8").tobytes())
            _flush(file)
        return digest.hexdigest()


def _flush(file: BinaryIO) -> None:
    """Through to the disk: a rename must not outrun the bytes it names."""
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_foreign(prefix: str | Path, *, has_card_after: bool) -> None:
    """Raise ValueError for token files that nothing proves to be of a writer's making: nanoGPT's train.bin, say."""
    tokens, index = file_paths(prefix)
    if has_card(prefix) or any(_abandoned([tokens, index])):
        return
    if index.exists():
        with index.open("rb") as file:
            is_index = file.read(len(MAGIC)) == MAGIC
        # without a card: another program's preprocess_data.py, or a writer without a tokenizer
        if is_index and not has_card_after:
            return
        found, why = index, "no card says who made it" if is_index else "it is no token index"
    elif tokens.exists():
        found, why = tokens, f"{index.name} is not beside it, so it is another program's"
    else:
        return
    raise ValueError(
        f"{found} exists and would be replaced, and {why}; choose another prefix, or move it away"
    )


def _temporary(paths: Sequence[Path], process: int) -> tuple[Path, ...]:
    """The process id: two processes that prepare the same file must not write into each other's."""
    return tuple(Path(f"{path}.{process}.tmp") for path in paths)


def _abandoned(paths: Sequence[Path]) -> Iterator[Path]:
    """Temporary files of writers that were killed."""
    names = "|".join(re.escape(path.name) for path in paths)
    name = re.compile(rf"(?:{names})\.\d+\.tmp")
    folder = paths[0].parent
    if folder.is_dir():
        yield from (folder / entry for entry in os.listdir(folder) if name.fullmatch(entry))


def _remove_abandoned(paths: Sequence[Path]) -> None:
    """For who has the lock: nothing else would ever free their space."""
    for path in _abandoned(paths):
        with contextlib.suppress(OSError):
            path.unlink()
