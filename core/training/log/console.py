"""The console: plain lines, and under them a progress bar when the output is a terminal."""

import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from core.training.log.leaving import let_the_first_rank_end, say_mistake, show_crash

_CELL = " | "


@contextmanager
def errors_as_one_line() -> Iterator[None]:
    """A script's outermost block: mistakes of the user end it with `error: ...` and status 1, not a traceback.

    A mistake that all ranks find is printed once: the other ranks wait a moment, and torchrun ends them when rank 0
    has left. Put it inside `launch` too: a rank that leaves the world before it has printed its error makes the
    others print that they lost a connection.
    """
    rank = int(os.environ.get("RANK") or 0)
    try:
        yield
    except KeyboardInterrupt:
        if rank == 0:
            say_mistake("interrupted")
        # 128 + SIGINT, as shells have it
        raise SystemExit(130) from None
    except RuntimeError as error:
        # another rank has left, and prints why
        lost_others = "onnection" in str(error)
        if rank == 0 or not lost_others:
            show_crash(error, lost_others=lost_others)
            raise
        first_line = str(error).splitlines()[0][:100]
        say_mistake(f"error: rank {rank} lost the others: {first_line}", lost_others=True)
        raise SystemExit(1) from None
    except (ValueError, OSError, ImportError) as error:
        # rank 0 prints without a rank: most mistakes are everybody's
        if rank:
            let_the_first_rank_end()
        speaker = f"rank {rank}: " if rank else ""
        limit = ""
        if getattr(error, "errno", None) == errno.EFBIG:
            limit = "; the limit on the size of files (ulimit -f) is below that of a file of this run: raise it"
        say_mistake(f"error: {speaker}{error}{limit}")
        raise SystemExit(1) from None
    except Exception as error:
        show_crash(error)
        raise


def terminal_width(most: int) -> int:
    """Columns of the terminal, at most so many; where the output is no terminal, so many."""
    if sys.stdout.isatty():
        return min(most, shutil.get_terminal_size().columns)
    return most


def fitted(line: str, width: int) -> str:
    """A line for a terminal of so many columns.

    Of a line of several cells ("step 1 | loss 2 | ...") the last ones are left out; a sentence goes on below; a
    drawing, which has spaces of its own, stays as it is.
    """
    if len(line) <= width:
        return line
    cells = line.split(_CELL)
    if len(cells) > 2:
        while len(cells) > 2 and len(_CELL.join(cells)) > width:
            cells.pop()
        return _CELL.join(cells)
    is_drawing = len(cells) == 2 or "  " in line.strip()
    if is_drawing:
        return line
    return "\n".join(
        textwrap.wrap(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    )


class Console:
    """`say(line)` prints on rank 0 only; inside `with`, `every_step` moves a bar on a terminal.

    tokens_per_step: of all ranks, for the bar's tokens/s; 0 leaves it out. start: steps that a resumed run does not
    make again; it may be set until `with`.
    """

    def __init__(
        self, rank: int, total_steps: int, *, tokens_per_step: int = 0, start: int = 0
    ) -> None:
        self.quiet = rank != 0
        self.total = total_steps
        self.tokens = tokens_per_step
        self.start = start
        self._progress: Any = None
        self._task: Any = None

    def say(self, text: str) -> None:
        """One line, at once; above the bar where there is one. On a terminal it has at most its columns."""
        if self.quiet:
            return
        width = terminal_width(sys.maxsize)
        text = "\n".join(fitted(line, width) for line in text.split("\n"))
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def __enter__(self) -> "Console":
        if self.quiet:
            return self
        try:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )
        except ImportError:  # lines alone will do
            return self
        columns = [
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}% | loss {task.fields[loss]:.3f} |"),
        ]
        if self.tokens:
            columns.append(TextColumn("{task.fields[speed]}"))
        columns += [TimeRemainingColumn(), TextColumn("left")]
        # transient: lines printed by `say` stay, the bar is gone at the end
        progress = Progress(*columns, transient=True)
        if progress.console.is_terminal:
            progress.start()
            self._task = progress.add_task(
                "training", total=self.total, completed=self.start, loss=float("nan"), speed=""
            )
            self._progress = progress
        return self

    @property
    def bar(self) -> bool:
        """Whether a bar is shown."""
        return self._progress is not None

    def every_step(self, step: int, loss: float) -> None:
        """Move the bar: `step` steps are done, the last of them with this loss."""
        if self._progress is None:
            return
        self._progress.update(self._task, completed=step, loss=loss)
        # of the last half minute; None at first
        steps_per_s = self._progress.tasks[self._task].speed
        if steps_per_s:
            self._progress.update(self._task, speed=f"{steps_per_s * self.tokens:,.0f} tokens/s |")

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
