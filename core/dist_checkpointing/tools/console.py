"""What commands say on a terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager


def printable(text: str) -> str:
    """What a terminal may be sent: control characters, of which it obeys some, are written as Python does."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def say(lines: str | Iterable[str], *, error: bool = False) -> None:
    """Prints a line, or lines, of whatever text, on standard output or `error`."""
    for line in [lines] if isinstance(lines, str) else lines:
        print(printable(line), file=sys.stderr if error else sys.stdout)


def size_text(nbytes: float) -> str:
    """A number of bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Columns as wide as they must be; those in `right` are aligned there."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(n) if i in right else cell.ljust(n)
            for i, (cell, n) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to be told of bytes that are done: a bar if `rich` is installed, else a line per 5 %, and nothing
    where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _Lines(what, total).advance
        return
    columns = TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


class _Lines:
    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._said = what, max(total, 1), 0, 0

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if (percent := 100 * self._done // self._total) >= self._said + 5:
            self._said = percent // 5 * 5
            print(f"{self._what} {percent} % of {size_text(self._total)}", file=sys.stderr)
