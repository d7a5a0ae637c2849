"""What a person sees: plain lines, and under them a progress bar when the output is a terminal."""

from types import TracebackType
from typing import Any


class Console:
    """`say(line)` prints on rank 0 only; inside `with`, `every_step` moves a bar on a terminal."""

    def __init__(self, rank: int, total_steps: int) -> None:
        self.quiet, self.total = rank != 0, total_steps
        self._progress: Any = None
        self._task: Any = None

    def say(self, text: str) -> None:
        """One line, at once; above the bar where there is one."""
        if self.quiet:
            return
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def __enter__(self) -> "Console":
        if self.quiet:
            return self
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:  # lines alone will do
            return self
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeRemainingColumn(),
        )
        progress = Progress(*columns, transient=True)
        if progress.console.is_terminal:
            progress.start()
            self._progress, self._task = progress, progress.add_task("training", total=self.total, loss=float("nan"))
        return self

    @property
    def bar(self) -> bool:
        """Whether a bar is shown."""
        return self._progress is not None

    def every_step(self, step: int, loss: float) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, loss=loss)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
