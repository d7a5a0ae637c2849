"""Rows of parquet files and saved datasets, as those of JSON lines: chats, prompts with answers, preferences."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from core.datasets.corpus.documents import TextChunk
from core.datasets.corpus.opening import first_row, import_extra, numbered_rows
from core.datasets.corpus.sources import TextSource

TABLES = ("parquet", "dataset")
ROWS_AT_ONCE = 512
# in the place of a first row that cannot be read
DAMAGED = object()


class DamagedTableError(Exception):
    """A damaged file, where the library that reads it has exceptions of its own."""


def table_chunks(source: TextSource) -> Iterator[TextChunk]:
    """All columns, as chunks of JSON lines."""
    for rows, share in _batches(source):
        lines = b"".join(_as_line(row) for row in rows)
        yield TextChunk("jsonl", lines, int(source.size * share))


def numbered_rows_of(source: TextSource) -> Iterator[tuple[int, bytes]]:
    """(number from 1, JSON) of each row; of JSON lines as `numbered_rows`."""
    if source.kind not in TABLES:
        yield from numbered_rows(source.path)
        return
    number = 0
    for rows, _ in _batches(source):
        for row in rows:
            number += 1
            yield number, _as_line(row)


def first_row_of(source: TextSource) -> Any:
    """The first row of a file that has rows; None where there is none, `DAMAGED` where it cannot be read.

    ValueError: half of a saved dataset. ImportError: an extra is missing.
    """
    if source.kind == "jsonl":
        return first_row(source.path)
    if source.kind not in TABLES:
        return None
    try:
        return next((rows[0] for rows, _ in _batches(source) if rows), None)
    except (DamagedTableError, OSError):
        # told when all of it is read
        return DAMAGED


def all_hold(sources: Sequence[TextSource], is_one: Callable[[Any], bool], what: str) -> bool:
    """Whether the first row of each file is one of `what`; files that cannot be read are told later.

    Raises ValueError: that is so for some of the files only.
    """
    first_rows = [(source, first_row_of(source)) for source in sources]
    ours = [source for source, row in first_rows if is_one(row)]
    others = [source for source, row in first_rows if row is not DAMAGED and not is_one(row)]
    if ours and others:
        raise ValueError(
            f"{len(ours)} of {len(sources)} files hold {what} ({ours[0].path}), {others[0].path} does not; prepare "
            "them one by one"
        )
    return bool(ours)


def open_dataset(source: TextSource) -> Any:
    """A folder of `save_to_disk`. Raises ValueError: half of one, a damaged one. ImportError: an extra is missing."""
    datasets = import_extra("datasets", source.path)
    arrow = import_extra("pyarrow", source.path)
    try:
        return datasets.load_from_disk(str(source.path))
    except (OSError, ValueError, KeyError, arrow.ArrowException) as error:
        # a reason of several lines, or none
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{source.path} is not all of a dataset of save_to_disk: {reason}; save it again, or copy the rest of "
            "its files"
        ) from error


def _batches(source: TextSource) -> Iterator[tuple[list[dict[str, Any]], float]]:
    """(a few rows, which share they are of all)."""
    if source.kind == "dataset":
        dataset = open_dataset(source)
        table_batches = dataset.with_format("arrow").iter(batch_size=ROWS_AT_ONCE)
        for batch in table_batches:
            yield _without_nulls(batch.to_pylist()), len(batch) / max(1, len(dataset))
        return
    parquet = import_extra("pyarrow.parquet", source.path)
    try:
        with parquet.ParquetFile(source.path) as file:
            count = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                yield _without_nulls(batch.to_pylist()), len(batch) / count
    except import_extra("pyarrow", source.path).ArrowInvalid as error:
        raise DamagedTableError(str(error)) from error


def _without_nulls(value: Any) -> Any:
    """Columns give every message every field; what a row lacks is null there, and absent in JSON lines.

    But for the content of a message, which is null beside tool calls.
    """
    if isinstance(value, dict):
        kept = {"content"} if "role" in value else set()
        return {
            key: _without_nulls(item)
            for key, item in value.items()
            if item is not None or key in kept
        }
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _as_line(row: dict[str, Any]) -> bytes:
    # times and the like, which nothing here reads, as text
    text = json.dumps(row, ensure_ascii=False, default=str)
    return text.encode("utf-8", "surrogatepass") + b"\n"
