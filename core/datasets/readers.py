"""Reads sources as pieces, streaming: neither a file nor a row group needs to fit in memory at once."""

import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any, BinaryIO, cast

from core.datasets.documents import PIECE_BYTES, Piece, cut_place, cuts
from core.datasets.sources import Source

PORTION_BYTES = 64 << 20  # a larger text file becomes several documents
_ROWS = 512


def read_pieces(
    sources: Sequence[Source], skipped: Counter[str], *, documents: str = "file", text_key: str = "text"
) -> Iterator[Piece]:
    """The content of the sources, in their order, in pieces of about 1 MB.

    documents: what a document is in a text file: `file`, `paragraph` (between blank lines) or `line`; a `file` of
    more than 64 MB is several. Whatever cannot be read is counted in `skipped`, by reason.
    Raises `ImportError` with the remedy: a source that needs an extra.
    """
    for source in sources:
        try:
            if source.kind == "parquet":
                yield from _parquet(source, text_key)
            elif source.kind == "dataset":
                yield from _dataset(source, text_key)
            else:
                with ExitStack() as files:
                    file, raw = _open(source, files)
                    if source.kind == "jsonl":
                        yield from _lines(file, raw)
                    else:
                        yield from _text(file, raw, documents, skipped)
        except (EOFError, zlib.error, gzip.BadGzipFile, _Damaged):
            skipped["files damaged from some place on"] += 1
        except OSError:
            skipped["files that cannot be read"] += 1


def _extra(name: str, source: Source) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{source.path} needs {name}, an extra: pip install 'paracore[data]'") from error


class _Damaged(Exception):
    """Of a library that has exceptions of its own."""


def _open(source: Source, files: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    """(the content, the file as it is on disk)."""
    raw = files.enter_context(source.path.open("rb"))
    suffix = source.path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, files.enter_context(gzip.GzipFile(fileobj=raw))), raw
    if suffix == ".zst":
        zstandard = _extra("zstandard", source)
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(_Translated(reader, zstandard.ZstdError), PIECE_BYTES), raw
    return raw, raw


class _Translated(io.RawIOBase):
    """A reader whose library's errors are told as `_Damaged`."""

    def __init__(self, reader: Any, error: type[Exception]) -> None:
        self._reader, self._error = reader, error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._reader.readinto(buffer)
        except self._error as error:
            raise _Damaged(str(error)) from error


def _lines(file: BinaryIO, raw: BinaryIO) -> Iterator[Piece]:
    at = 0
    while content := file.read(PIECE_BYTES):
        if not content.endswith(b"\n"):
            content += file.readline()
        yield Piece("jsonl", content, raw.tell() - at)
        at = raw.tell()


def _text(file: BinaryIO, raw: BinaryIO, documents: str, skipped: Counter[str]) -> Iterator[Piece]:
    at, rest = 0, b""
    if not file.peek(1):  # type: ignore[attr-defined]
        skipped["empty documents"] += 1
    while content := rest + file.read(PORTION_BYTES + 1 - len(rest)):
        rest = b""
        if len(content) > PORTION_BYTES:
            place = cut_place(content, 0, PORTION_BYTES, documents)
            if place == len(content):  # no line end far and wide
                place = cut_place(content, 0, PORTION_BYTES)
            content, rest = content[:place], content[place:]
        size, at = raw.tell() - at, raw.tell()
        if why := _unreadable(content):
            skipped[why] += 1
            continue
        parts = list(cuts(content, PIECE_BYTES, documents))
        for i, part in enumerate(parts):
            share = size * (i + 1) // len(parts) - size * i // len(parts)
            yield Piece(documents, part, share, i == 0 or documents != "file", i == len(parts) - 1)


def _unreadable(content: bytes) -> str | None:
    """Why a document is skipped."""
    if b"\0" in content[:8192]:
        return "binary files"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return "undecodable files"
    return None if text.strip() else "empty documents"


def _parquet(source: Source, text_key: str) -> Iterator[Piece]:
    parquet = _extra("pyarrow.parquet", source)
    try:
        with parquet.ParquetFile(source.path) as file:
            rows = file.metadata.num_rows
            if text_key not in file.schema_arrow.names:
                yield Piece("texts", [None] * rows, source.size)
                return
            for batch in file.iter_batches(batch_size=_ROWS, columns=[text_key]):
                yield Piece("texts", batch.column(0).to_pylist(), source.size * len(batch) // max(1, rows))
    except _extra("pyarrow", source).ArrowInvalid as error:
        raise _Damaged(str(error)) from error


def _dataset(source: Source, text_key: str) -> Iterator[Piece]:
    found = _extra("datasets", source).load_from_disk(str(source.path))
    if text_key not in found.column_names:
        yield Piece("texts", [None] * len(found), source.size)
        return
    for batch in found.select_columns([text_key]).iter(batch_size=_ROWS):
        yield Piece("texts", list(batch[text_key]), source.size * len(batch[text_key]) // max(1, len(found)))
