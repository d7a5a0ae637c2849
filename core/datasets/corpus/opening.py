"""Files of text as they are read: unpacked, and arrays of JSON as the lines that they stand for."""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, NamedTuple

from core.datasets.corpus.documents import CHUNK_BYTES

PACKED = (".gz", ".zst")
# bytes: an array is parsed as a whole, which takes several times its size
LARGEST_ARRAY = 1 << 30
_ARRAY_OF_OBJECTS = re.compile(rb"\[\s*\{")
_PEEKED = 4096
_LONGEST_ROW = 16 << 20


def import_extra(name: str, path: Path) -> Any:
    """The module; ImportError with the remedy: it is missing, which `path` needs."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{path} needs {name}: pip install {name}") from error


class OpenedText(NamedTuple):
    """content: what is in the file. raw: the file as it is on disk. damage: what ended the content early, or None."""

    content: BinaryIO
    raw: BinaryIO
    damage: Callable[[], Exception | None]

    def is_torn(self) -> bool:
        """Whether the last thing that was read may lack its end; what lies behind a whole archive tears nothing."""
        return not isinstance(self.damage(), (NoneType, gzip.BadGzipFile))


def open_text(path: Path, files: ExitStack) -> OpenedText:
    """What is in the file, unpacked; of a `.json` that is an array of objects, those as lines.

    Raises ValueError: an array that is no JSON, or too large for memory. OSError. ImportError: an extra is missing.
    """
    opened = _unpacked(path, files)
    if not is_json(path) or not _ARRAY_OF_OBJECTS.match(_beginning(opened.content)):
        return opened
    return opened._replace(content=io.BytesIO(b"".join(_elements(path, opened.content))))


def _unpacked(path: Path, files: ExitStack) -> OpenedText:
    raw = files.enter_context(path.open("rb"))
    suffix = path.suffix.lower()
    if suffix == ".gz":
        # what is in front of the damage is read: a truncated download still has most of its text
        packed: Any = files.enter_context(gzip.GzipFile(fileobj=raw))
        unpacked = _Unpacked(packed, EOFError, zlib.error, gzip.BadGzipFile)
    elif suffix == ".zst":
        zstandard = import_extra("zstandard", path)
        packed = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        unpacked = _Unpacked(packed, zstandard.ZstdError)
    else:
        return OpenedText(raw, raw, lambda: None)
    return OpenedText(io.BufferedReader(unpacked, CHUNK_BYTES), raw, lambda: unpacked.damage)


class _Unpacked(io.RawIOBase):
    """What a reader unpacks. It ends where the packed file is damaged, and `damage` is the library's error then."""

    def __init__(self, reader: Any, *errors: type[Exception]) -> None:
        self._reader = reader
        self._errors = errors
        self.damage: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.damage is not None:
            return 0
        try:
            # not `readinto`, which loses what precedes an error
            return self._reader.readinto1(buffer)
        except self._errors as error:
            self.damage = error
            return 0


def suffix_of(path: Path) -> str:
    """In lower case; of `rows.jsonl.gz`, that of `rows.jsonl`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_json(path: Path) -> bool:
    """Whether it is called `.json`: an array of rows, JSON lines, or no rows at all."""
    return suffix_of(path) == ".json"


def holds_rows(path: Path) -> bool:
    """Whether a `.json` is an array of objects, or JSON lines of them, by its beginning."""
    try:
        with ExitStack() as files:
            content = _unpacked(path, files).content
            beginning = _beginning(content)
            if beginning.startswith(b"["):
                return _ARRAY_OF_OBJECTS.match(beginning) is not None
            # one object is the settings of something; rows are several, each on a line of its own
            return all(_is_object(content.readline(_LONGEST_ROW)) for _ in range(2))
    except OSError:
        return True  # reading it will say so


def numbered_rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, JSON) of the lines that are not empty, or of the elements of an array; as `open_text`."""
    with ExitStack() as files:
        for number, line in enumerate(open_text(path, files).content, 1):
            if line.strip():
                yield number, line


def first_row(path: Path) -> Any:
    """The first row of a file; None where there is none."""
    try:
        return json.loads(next(numbered_rows(path), (0, b"null"))[1])
    except (OSError, ValueError, RecursionError):
        # told when all of it is read
        return None


def _beginning(content: BinaryIO) -> bytes:
    """Its first bytes that are no white space; it stays at its beginning."""
    return content.peek(_PEEKED)[:_PEEKED].removeprefix(codecs.BOM_UTF8).lstrip()  # type: ignore[attr-defined]


def _elements(path: Path, content: BinaryIO) -> Iterator[bytes]:
    """A line of JSON for each element."""
    whole = content.read(LARGEST_ARRAY + 1)
    if len(whole) > LARGEST_ARRAY:
        raise ValueError(
            f"{path} is one JSON array of more than {LARGEST_ARRAY >> 20} MiB, which is parsed as a whole; write "
            "JSON lines (.jsonl), a row on each"
        )
    try:
        rows = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no JSON: {error}; write the array anew, or JSON lines"
        ) from None
    for row in rows:
        # a string may hold half of a surrogate pair; who reads the lines counts it
        yield json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
