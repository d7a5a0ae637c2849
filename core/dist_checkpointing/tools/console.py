"""What commands print on a terminal: lines, tables, sizes, progress."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager


def printable(text: str) -> str:
    """What a terminal may be sent: control characters, of which it obeys some, are written as Python does."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def say(lines: str | Iterable[str], *, error: bool = False) -> None:
    """Prints a line, or lines, of whatever text, on standard output or `error`."""
    for line in [lines] if isinstance(lines, str) else lines:
        print(printable(line), file=sys.stderr if error else sys.stdout)


def size_text(nbytes: float) -> str:
    """A number of bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            if unit == "B":
                return f"{nbytes:.0f} B"
            return f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Columns as wide as their longest text; the columns `right` are aligned to the right."""
    rows = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        texts = []
        for column, (text, width) in enumerate(zip(row, widths, strict=True)):
            texts.append(text.rjust(width) if column in right else text.ljust(width))
        lines.append("  ".join(texts).rstrip())
    return lines


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to be called with bytes that are done, of `total`.

    It moves a bar if `rich` is installed, else prints a line per 5 %; nothing where standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    # rich is optional: importing it takes long, and not every machine has it
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        yield _PercentLines(title, total).advance
        return
    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


class _PercentLines:
    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = max(total, 1)
        self._done_bytes = 0
        self._printed_percent = 0

    def advance(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        percent = 100 * self._done_bytes // self._total
        if percent >= self._printed_percent + 5:
            self._printed_percent = percent // 5 * 5
            print(f"{self._title} {percent} % of {size_text(self._total)}", file=sys.stderr)
