"""How far a long command is: a bar on a terminal, else a plain line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SECONDS = 5.0  # between two lines


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to be called with bytes that are done; it shows rate and time left on standard error."""
    bar = _bar(title) if sys.stderr.isatty() else None
    if bar is None:
        yield _ProgressLines(title, total).advance
        return
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def _bar(title: str) -> Any:
    """A bar of rich; None if it is not installed."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
    except ImportError:
        return None
    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


class _ProgressLines:
    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._begin = self._last_print = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Count, and print a line if the last one is some seconds old."""
        self._done += nbytes
        now = time.monotonic()
        if now - self._last_print >= _SECONDS:
            self._last_print = now
            rate = self._done / (now - self._begin)
            remaining_s = max(0, self._total - self._done) / rate if rate else 0
            print(
                f"{self._title}: {self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s, "
                f"{remaining_s:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
