"""How far a long command is: a bar on a terminal, else a plain line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SECONDS = 5.0  # between two lines


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to be told of bytes that are done; it shows rate and time left on standard error."""
    bar = _bar(what, total) if sys.stderr.isatty() else None
    if bar is None:
        yield _ProgressLines(what, total).advance
        return
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def _bar(what: str, total: int) -> Any:
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
    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


class _ProgressLines:
    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._begin = self._said = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Count, and say so if nothing was said for a while."""
        self._done += nbytes
        now = time.monotonic()
        if now - self._said >= _SECONDS:
            self._said = now
            rate = self._done / (now - self._begin)
            left = max(0, self._total - self._done) / rate if rate else 0
            print(
                f"{self._what}: {self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s, "
                f"{left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
