"""Reads sources as chunks, streaming: neither a file nor a row group needs to fit in memory at once."""

import codecs
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from core.datasets.corpus.documents import (
    CHUNK_BYTES,
    PARAGRAPH_ENDS,
    TextChunk,
    cut_position,
    cuts,
    last_end,
)
from core.datasets.corpus.opening import OpenedText, import_extra, open_text
from core.datasets.corpus.sources import TextSource
from core.datasets.corpus.tables import (
    ROWS_AT_ONCE,
    TABLES,
    DamagedTableError,
    open_dataset,
    table_chunks,
)

# read at once; a larger text file becomes several documents
PORTION_BYTES = 64 << 20
# how many of the files that are left out for one reason are named
_NAMED = 3


def read_chunks(
    sources: Sequence[TextSource],
    skipped: Counter[str],
    *,
    documents: str = "file",
    text_key: str = "text",
    rows: bool = False,
) -> Iterator[TextChunk]:
    """The content of the sources, in their order, in chunks of about 1 MB.

    documents: what a document is in a text file: `file`, `paragraph` (between blank lines) or `line`; a `file` of
    more than 64 MB is several. Of a damaged compressed file, the whole documents (of kind `file`: lines) up to the
    damage are read. Whatever cannot be read is counted in `skipped`, by reason; the first few are told. rows: of
    tables all columns, as JSON lines; else those of `text_key`.
    Raises `ImportError` with the remedy: a source that needs an extra. ValueError: half of a saved dataset.
    """
    for source in sources:
        try:
            if rows and source.kind in TABLES:
                yield from table_chunks(source)
            elif source.kind == "parquet":
                yield from _parquet_chunks(source, text_key)
            elif source.kind == "dataset":
                yield from _dataset_chunks(source, text_key)
            else:
                with ExitStack() as files:
                    opened = open_text(source.path, files)
                    if source.kind == "jsonl":
                        yield from _line_chunks(opened)
                    else:
                        yield from _text_chunks(opened, documents, skipped)
                    if opened.damage() is not None:
                        skipped["damaged compressed files"] += 1
        except DamagedTableError as error:
            _skip(source, "files damaged from some place on", error, skipped)
        except OSError as error:
            _skip(source, "files that cannot be read", error, skipped)


def _skip(source: TextSource, reason: str, error: Exception, skipped: Counter[str]) -> None:
    skipped[reason] += 1
    if skipped[reason] <= _NAMED:
        warnings.warn(f"{source.path} is not read, or not all of it: {error}", stacklevel=3)


def _line_chunks(opened: OpenedText) -> Iterator[TextChunk]:
    previous_position = 0  # in the file on disk
    while content := opened.content.read(CHUNK_BYTES):
        if not content.endswith(b"\n"):
            content += opened.content.readline()
        if opened.is_torn():
            content = content[: content.rfind(b"\n") + 1]
        position = opened.raw.tell()
        yield TextChunk("jsonl", content, position - previous_position)
        previous_position = position


def _text_chunks(opened: OpenedText, documents: str, skipped: Counter[str]) -> Iterator[TextChunk]:
    """Chunks of a text file. A file larger than a portion is cut where `documents` allows it."""
    file = opened.content
    raw = opened.raw
    # in the file on disk, compressed or not: what progress is measured in
    previous_position = 0
    # what a cut left over of the last portion
    rest = b""
    if not file.peek(1) and opened.damage() is None:  # type: ignore[attr-defined]
        skipped["empty documents"] += 1
    is_beginning = True
    # one byte more than a portion: so a file of exactly one portion is not taken for a larger one
    while content := rest + file.read(PORTION_BYTES + 1 - len(rest)):
        rest = b""
        if len(content) > PORTION_BYTES:
            cut = cut_position(content, 0, PORTION_BYTES, documents)
            if cut == len(content):  # no line end far and wide
                cut = cut_position(content, 0, PORTION_BYTES)
            content, rest = content[:cut], content[cut:]
        elif opened.is_torn():
            content = _without_torn_end(content, documents)
            if not content:
                return
        if is_beginning:
            content = content.removeprefix(codecs.BOM_UTF8)
            is_beginning = False
        position = raw.tell()
        size = position - previous_position
        previous_position = position
        if reason := _unreadable(content):
            skipped[reason] += 1
            continue
        sections = list(cuts(content, CHUNK_BYTES, documents))
        for i, section in enumerate(sections):
            # shares of the bytes on disk that add up to `size`
            share = size * (i + 1) // len(sections) - size * i // len(sections)
            is_first = i == 0 or documents != "file"
            yield TextChunk(documents, section, share, is_first, i == len(sections) - 1)


def _without_torn_end(content: bytes, documents: str) -> bytes:
    """Without the paragraph or line that has no end; a file stays up to its last complete line."""
    ends = PARAGRAPH_ENDS if documents == "paragraph" else (b"\n",)
    return content[: last_end(content, ends, 0, len(content))]


def _unreadable(content: bytes) -> str | None:
    """Why a document is skipped; None if it is not."""
    # as git tells binary files: text has no zero byte in its first kilobytes
    if b"\0" in content[:8192]:
        return "binary files"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return "undecodable files"
    if text.strip():
        return None
    return "empty documents"


def _parquet_chunks(source: TextSource, text_key: str) -> Iterator[TextChunk]:
    parquet = import_extra("pyarrow.parquet", source.path)
    try:
        with parquet.ParquetFile(source.path) as file:
            rows = file.metadata.num_rows
            if text_key not in file.schema_arrow.names:
                yield TextChunk("texts", [None] * rows, source.size)
                return
            # only the column of texts, a few rows at a time: row groups may be larger than memory
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[text_key]):
                yield TextChunk(
                    "texts", batch.column(0).to_pylist(), source.size * len(batch) // max(1, rows)
                )
    except import_extra("pyarrow", source.path).ArrowInvalid as error:
        raise DamagedTableError(str(error)) from error


def _dataset_chunks(source: TextSource, text_key: str) -> Iterator[TextChunk]:
    dataset = open_dataset(source)
    if text_key not in dataset.column_names:
        yield TextChunk("texts", [None] * len(dataset), source.size)
        return
    for batch in dataset.select_columns([text_key]).iter(batch_size=ROWS_AT_ONCE):
        texts = list(batch[text_key])
        yield TextChunk("texts", texts, source.size * len(texts) // max(1, len(dataset)))
