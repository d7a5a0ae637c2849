"""Token files in Megatron's format: `.bin` holds the tokens, `.idx` where each document begins and ends.

`.idx`, little endian: magic (9 bytes), version u64, dtype code u8, number of sequences n u64, number of
document indices d u64, sequence lengths i32 [n], byte pointers into `.bin` i64 [n], document indices i64 [d]:
document i is made of sequences indices[i] .. indices[i+1], so d is the number of documents plus one.
"""

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"))}
_DTYPES[8] = np.dtype("<u2")  # 6 and 7 are floating point: no token ids
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_REMEDY = "write it again with TokenFileWriter"

Array = npt.NDArray[np.integer]


def _paths(prefix: str | Path) -> tuple[Path, Path]:
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


class TokenFile:
    """The documents in `prefix.bin` and `prefix.idx`, memory mapped: opening costs the same at any size.

    Opening checks magic, version, dtype code and the exact length of both files against the header;
    raises `ValueError` naming the file, what was expected and what was found.
    """

    def __init__(self, prefix: str | Path) -> None:
        self._bin_path, self._idx_path = _paths(prefix)
        for path in (self._bin_path, self._idx_path):
            if not path.is_file():
                raise FileNotFoundError(f"{path} does not exist: a token file is a .bin and an .idx; {_REMEDY}")
        self.dtype, num_sequences, num_indices = self._read_header()
        index = _map(self._idx_path, np.dtype("u1"))
        ends = np.cumsum([_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_indices]).tolist()
        # offsets are odd, so these are unaligned views: numpy reads them correctly
        self._lengths = index[ends[0] : ends[1]].view("<i4")
        self._pointers = index[ends[1] : ends[2]].view("<i8")
        self._indices = index[ends[2] : ends[3]].view("<i8")
        self._check_lengths()
        self._tokens = _map(self._bin_path, self.dtype)

    def _read_header(self) -> tuple[np.dtype, int, int]:
        path = self._idx_path
        size = path.stat().st_size
        if size < _HEADER.size:
            raise ValueError(f"{path} has {size} bytes, its header alone has {_HEADER.size}; {_REMEDY}")
        with path.open("rb") as file:
            magic, version, code, sequences, indices = _HEADER.unpack(file.read(_HEADER.size))
        if magic != _MAGIC:
            raise ValueError(f"{path} begins with {magic!r}, a token index with {_MAGIC!r}; {_REMEDY}")
        if version != _VERSION:
            raise ValueError(f"{path} has version {version}, this reads version {_VERSION}; {_REMEDY}")
        if code not in _DTYPES:
            raise ValueError(f"{path} has dtype code {code}, integers are {sorted(_DTYPES)}; {_REMEDY}")
        expected = _HEADER.size + 12 * sequences + 8 * indices
        if size != expected:
            raise ValueError(
                f"{path} has {size} bytes, its header of {sequences} sequences and {indices} document "
                f"indices makes {expected}; {_REMEDY}"
            )
        return _DTYPES[code], sequences, indices

    def _check_lengths(self) -> None:
        """Both ends of every table must meet; the middle is checked where it is read, see `document`."""
        found = (int(self._indices[0]), int(self._indices[-1])) if self._indices.size else None
        if found != (0, self._lengths.size):
            raise ValueError(
                f"{self._idx_path}: documents span sequences {found}, the file has 0 to "
                f"{self._lengths.size}; {_REMEDY}"
            )
        expected = self._end(self._lengths.size - 1) if self._lengths.size else 0
        size = self._bin_path.stat().st_size
        if size != expected:
            raise ValueError(f"{self._bin_path} has {size} bytes, {self._idx_path.name} says {expected}; {_REMEDY}")

    def _end(self, sequence: int) -> int:
        """The byte after the sequence."""
        return int(self._pointers[sequence]) + int(self._lengths[sequence]) * self.dtype.itemsize

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self._indices.size - 1

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
        return self._tokens[start:stop]

    def document(self, number: int) -> Array:
        """The tokens of one document: a read-only view `[length]`.

        Raises `ValueError` if there is no such document, or if the index is damaged there.
        """
        if not 0 <= number < self.num_documents:
            raise ValueError(f"document {number} of {self._idx_path}, which has {self.num_documents}; ask for less")
        first, last = self._indices[number : number + 2].tolist()
        if not 0 <= first <= last <= self._lengths.size:
            raise ValueError(
                f"{self._idx_path}: document {number} spans sequences {first} to {last} of "
                f"{self._lengths.size}; {_REMEDY}"
            )
        bounds = [self._start(sequence) for sequence in range(first, last + 1)]
        ends = [self._end(sequence) for sequence in range(first, last)]
        inside = bounds[0] >= 0 and bounds[-1] <= self._tokens.nbytes
        if not inside or bounds[1:] != ends or bounds != sorted(bounds) or bounds[0] % self.dtype.itemsize:
            raise ValueError(
                f"{self._idx_path}: the sequences of document {number} begin at bytes {bounds}, "
                f"their lengths end them at {ends}; {_REMEDY}"
            )
        return self._tokens[bounds[0] // self.dtype.itemsize : bounds[-1] // self.dtype.itemsize]

    def _start(self, sequence: int) -> int:
        """The first byte of the sequence; the end of the file counts as one sequence more."""
        if sequence < self._lengths.size:
            return int(self._pointers[sequence])
        return self._tokens.nbytes


def _map(path: Path, dtype: np.dtype) -> Array:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _flush(file: BinaryIO) -> None:
    """Through to the disk: a rename must not outrun the bytes it names."""
    file.flush()
    os.fsync(file.fileno())


class TokenFileWriter:
    """Writes documents to `prefix.bin` and `prefix.idx`; both appear when the `with` block ends well.

    Until then they carry temporary names, so an interrupted run leaves nothing that opens, and a file that
    was there before stays. The dtype is uint16 where `vocab_size` ids fit, else int32; `dtype` overrides it.
    Raises `ValueError` if the vocabulary is larger than the dtype.
    """

    def __init__(self, prefix: str | Path, *, vocab_size: int, dtype: npt.DTypeLike | None = None) -> None:
        if dtype is None:
            dtype = "<u2" if vocab_size <= 2**16 else "<i4"
        self.dtype = np.dtype(dtype)
        if self.dtype not in _CODES:
            raise ValueError(f"dtype {self.dtype} is none of {sorted(map(str, _CODES))}; use uint16 or int32")
        largest = int(np.iinfo(self.dtype).max)
        if not 0 < vocab_size <= largest + 1:
            raise ValueError(
                f"vocab_size={vocab_size}, but {self.dtype} holds 1 to {largest + 1} ids; use a larger dtype"
            )
        self.vocab_size = vocab_size
        self._paths = _paths(prefix)
        # the process id: two processes that prepare the same file must not write into each other's
        self._temporary = tuple(Path(f"{path}.{os.getpid()}.tmp") for path in self._paths)
        self._lengths: list[int] = []

    def __enter__(self) -> "TokenFileWriter":
        self._lengths = []
        self._file = self._temporary[0].open("wb")
        return self

    def add_document(self, tokens: Sequence[int] | Array) -> None:
        """Append one document, `[length]`; raises `ValueError` on an id outside the vocabulary."""
        array = np.asarray(tokens)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"document {len(self._lengths)} is {array.dtype} of shape {list(array.shape)}; "
                "give integers of shape [length]"
            )
        if array.size and not (array.min() >= 0 and array.max() < self.vocab_size):
            raise ValueError(
                f"document {len(self._lengths)} has tokens {array.min()} to {array.max()}, "
                f"vocab_size={self.vocab_size} allows 0 to {self.vocab_size - 1}; "
                "use the tokenizer of this size"
            )
        self._file.write(array.astype(self.dtype).tobytes())
        self._lengths.append(array.size)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                _flush(self._file)
            if kind is None:
                self._commit()
        finally:
            for path in self._temporary:
                path.unlink(missing_ok=True)

    def _commit(self) -> None:
        with self._temporary[1].open("wb") as file:
            file.write(self._index())
            _flush(file)
        # An old index must not survive beside new tokens: without .idx nothing opens, so it goes first
        # and its successor comes last.
        self._paths[1].unlink(missing_ok=True)
        for temporary, path in zip(self._temporary, self._paths, strict=True):
            temporary.replace(path)

    def _index(self) -> bytes:
        n = len(self._lengths)
        lengths = np.array(self._lengths, "<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        pointers = np.concatenate([np.zeros(1, "<i8"), ends])[:n]
        header = _HEADER.pack(_MAGIC, _VERSION, _CODES[self.dtype], n, n + 1)
        return header + lengths.tobytes() + pointers.tobytes() + np.arange(n + 1, dtype="<i8").tobytes()
