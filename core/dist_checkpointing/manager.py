"""The checkpoints of a training run: steps in one directory, saved beside the training, found after anything."""

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, SupportsFloat

from core.dist_checkpointing.planning.exchange import exchanged_cells, gather_json, local_cells
from core.dist_checkpointing.planning.prepare import SavePlan, Weights
from core.dist_checkpointing.planning.ranks import DamagedCheckpoint, agree, default_state, from_first, problem_of
from core.dist_checkpointing.publish.lock import Lock
from core.dist_checkpointing.publish.retention import Retention, checked_metrics
from core.dist_checkpointing.publish.root import Root, step_name
from core.dist_checkpointing.reading.loading import load
from core.dist_checkpointing.storage.place import PosixPlace
from core.dist_checkpointing.writing.async_save import Background, SaveStats, WriterProgram
from core.dist_checkpointing.writing.job import Job
from core.dist_checkpointing.writing.saving import Saver
from core.dist_checkpointing.writing.slab import aligned
from core.parallel_state import ParallelState
from core.parallel_state.config import raise_all
from core.parallel_state.flat import volume

log = logging.getLogger(__name__)

_REMOVED = 10  # steps that another job may remove while they are read: its saves are faster than this reading


class SaveHandle:
    """An asynchronous save under way. `stats.stall_ms` is what it cost the loop."""

    def __init__(self, step: int, manager: "CheckpointManager", job: Job, stats: SaveStats) -> None:
        self.step, self.stats, self._manager, self._job = step, stats, manager, job

    def done(self) -> bool:
        """Whether it is over, committed or failed, on this rank."""
        return self._manager._ended(self, 0.0)

    def wait(self) -> None:
        """Block until it is committed. Raises RuntimeError: it failed (once; or the next save does)."""
        self._manager._ended(self, None)
        if (failure := self._manager._taken_failure()) is not None:
            raise RuntimeError(failure)


class CheckpointManager:
    """Saves steps under `root`, keeps the newest ones, and loads the newest that verifies. Collective throughout.

    keep_last, keep_every, keep_hours, keep_best (by the `metrics` that saves are given): see `Retention`.
    when_busy: what `save_async` does while a save is under way: "wait" for it (that is part of the stall), or "skip"
    this one. A step saved again replaces itself only when the new one is whole. run: who wrote, for the manifest.
    share_reads: see `load`.
    One job at a time per root: a lock with a heartbeat is held from the first save to `close`.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        keep_hours: float | None = None,
        keep_best: str | None = None,
        keep_best_count: int = 1,
        keep_best_mode: Literal["min", "max"] = "min",
        ps: ParallelState | None = None,
        when_busy: Literal["wait", "skip"] = "wait",
        weights: Weights = "derive",
        run: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        stale_s: float = 60.0,
        share_reads: bool | None = None,
    ) -> None:
        raise_all(
            "CheckpointManager",
            [(when_busy in ("wait", "skip"), f"when_busy={when_busy!r} must be 'wait' or 'skip'")],
        )
        self.ps = ps if ps is not None else default_state()
        self.share_reads = share_reads
        self.root, self.when_busy, self.stale_s, self.timeout_s = str(root), when_busy, stale_s, timeout_s
        self._saver = Saver(
            self.root,
            self.ps,
            run=run,
            timeout_s=timeout_s,
            weights=weights,
            retention=Retention(
                keep_last=keep_last,
                keep_every=keep_every or None,
                keep_hours=keep_hours,
                keep_best=keep_best,
                keep_best_count=keep_best_count,
                keep_best_mode=keep_best_mode,
            ),
        )
        self._lock: Lock | None = None
        self._writer: WriterProgram | None = None
        self._handle: SaveHandle | None = None
        self._copy: Background | None = None
        self._failure: str | None = None
        self._begun = False

    def steps(self) -> list[int]:
        """Every committed step, ascending."""
        return Root(self.root).steps()

    def url(self, step: int) -> str:
        """Where a step lies. ValueError: there is none, with those that there are."""
        return Root(self.root).open(step).address

    # saving

    def save(self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None = None) -> SaveStats:
        """Save a step and return when it is committed. Raises what went wrong, on all ranks (see `save`).

        metrics: name -> number, rank 0's are told in the manifest; `keep_best` looks at them. ValueError: no numbers.
        """
        told = checked_metrics(metrics)
        self._begin()
        self._settle()
        return self._saver.save(step_name(step), state, self._obstacle(), told)

    def prepare(self, state: Any) -> None:
        """Before training: plan, warm memory, start the writer: the first save is as short as later ones then."""
        self._begin()
        size = self._bytes(self._saver.prepare(state))
        agree(problem_of(lambda: self._program().start(size)), self.ps)

    def save_async(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> SaveHandle | None:
        """Copy this rank's cells and return; a program of its own writes and commits them, also if this one dies.

        The state may change as soon as this returns (on an accelerator: as soon as `before_update` does). None: a
        save is under way, and `when_busy` says to skip. metrics: as `save`. Raises what went wrong with the save
        before, on all ranks.
        """
        begin, told = time.perf_counter(), checked_metrics(metrics)
        self._begin()
        if self.when_busy == "skip" and self._busy():
            return None
        self._settle()
        prepared = self._saver.prepare(state, self._obstacle())
        job, stats = self._saver.job(step_name(step), prepared, told), SaveStats(bytes=self._bytes(prepared))

        def start() -> None:
            self._program().start(stats.bytes)
            if self.ps.rank == 0:
                job.begin()

        try:
            agree(problem_of(start), self.ps)
            program = self._program()
            moved = exchanged_cells(
                prepared.plan, prepared.arrays, prepared.parts, self.ps.rank, self.ps.world, self.ps.device
            )
            program.take(moved)
        except BaseException:  # an interrupt, too: nothing was handed over
            with contextlib.suppress(OSError, ValueError):
                job.withdraw()
            raise
        self._handle = SaveHandle(step, self, job, stats)
        stats.exchange_ms = 1e3 * (time.perf_counter() - begin)

        def copy() -> None:
            program.take(local_cells(prepared.plan, prepared.arrays, prepared.parts, self.ps.rank))
            program.begin(job)

        self._copy = Background(copy, threaded=self.ps.device.type != "cpu", device=self.ps.device)
        stats.stall_ms = 1e3 * (time.perf_counter() - begin)
        return self._handle

    def before_update(self) -> None:
        """Wait until the copy of the last `save_async` is complete: before parameters change."""
        if self._copy is not None:
            copy, self._copy = self._copy, None
            if (problem := problem_of(copy.wait)) is not None:  # nothing was handed over
                self._over(f"{type(problem).__name__}: {problem}")

    def _begin(self) -> None:
        """Once: the lock, and what killed jobs left is finished or removed."""
        if self._begun:
            return

        def enter() -> None:
            root = Root(self.root, stale_s=self.stale_s)
            self._lock = root.lock()
            root.wait_for_writers(self.timeout_s)
            root.sweep()

        agree(problem_of(enter) if self.ps.rank == 0 else None, self.ps)
        self._begun = True

    def _program(self) -> WriterProgram:
        if self.root.startswith("memory:"):
            raise ValueError(
                f"{self.root} lives in this process, the writer is another one: use save, not save_async"
            )
        if self._writer is None:
            self._writer = WriterProgram(log_file(self.root, self.ps.rank))
        return self._writer

    def _bytes(self, prepared: SavePlan) -> int:
        """What this rank's cells take in the slab."""
        owned = prepared.plan.owned(self.ps.rank)
        return sum(aligned(volume(box) * prepared.arrays[key].itemsize) for key, _, box in owned)

    def _busy(self) -> bool:
        """Whether a save is under way on any rank."""
        busy = self._handle is not None and not self._ended(self._handle, 0.0)
        return any(gather_json(busy, self.ps.world, self.ps.device))

    def _settle(self) -> None:
        if self._handle is not None:
            self._ended(self._handle, None)

    def _ended(self, handle: SaveHandle, timeout_s: float | None) -> bool:
        """Whether that save is over; its failure is kept until somebody is told."""
        self.before_update()
        if handle is not self._handle:
            return True
        assert self._writer is not None
        try:
            error, handle.stats.seconds = self._writer.wait(timeout_s)
        except TimeoutError:
            return False
        self._over(error)
        return True

    def _over(self, error: str | None) -> None:
        """The save under way has ended. One that failed is ended for the other ranks' writers too, which may wait."""
        assert self._handle is not None
        handle, self._handle = self._handle, None
        if error is not None:
            self._failure = f"the save of step {handle.step} failed: {error}"
            with contextlib.suppress(OSError):  # the temporary may be gone
                handle._job.abandon() if self.ps.rank == 0 else handle._job.fail(error)

    def _obstacle(self) -> str | None:
        """Why this rank must not save: a failure nobody was told of, a lock that another job took over."""
        failure = self._taken_failure()
        if failure is None and self._lock is not None and (lost := problem_of(self._lock.check)) is not None:
            failure = str(lost)
        return failure

    def _taken_failure(self) -> str | None:
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Wait for the save under way, end the writer, give the lock back. Raises RuntimeError: that save failed."""
        self._settle()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._begun = False
        if (failure := self._taken_failure()) is not None:
            raise RuntimeError(failure)

    # loading

    def load(self, step: int, template: Any, *, strict: bool = True) -> Any:
        """Read one step into the tensors of `template` (see `load`). ValueError: no such step; names those there."""

        def find() -> str:
            try:
                return self._where(step)
            except FileNotFoundError as error:
                raise ValueError(str(error)) from error

        where = from_first(find, self.ps)
        return load(template, where, strict=strict, ps=self.ps, share_reads=self.share_reads)

    def load_latest(self, template: Any, *, strict: bool = True) -> tuple[int, Any]:
        """(step, state) of the newest step that verifies; damaged ones are left out, with a warning naming the file.

        Waits for a writer that a killed job left behind. Where another job removes the step that is read, the steps
        are listed again. Raises FileNotFoundError: no step at all. DamagedCheckpoint: none is whole; `template` then
        holds nothing defined. ValueError: the newest does not fit `template`.
        """

        def find() -> list[int]:
            Root(self.root, stale_s=self.stale_s).wait_for_writers(self.timeout_s)
            return self.steps()

        self._settle()
        steps, problems = from_first(find, self.ps), dict[int, str]()
        while left := [step for step in steps if step not in problems]:
            step = left[-1]
            try:
                where = from_first(partial(self._where, step), self.ps)
                return step, load(template, where, strict=strict, ps=self.ps, share_reads=self.share_reads)
            except (DamagedCheckpoint, FileNotFoundError) as error:
                problems[step] = f"step {step}: {error}"
            steps = from_first(self.steps, self.ps)
            told = "is damaged, falling back to the one before" if step in steps else "was removed, looking again"
            log.warning("checkpoint %s %s: %s", step_name(step), told, problems[step])
            if len(problems.keys() - set(steps)) > _REMOVED:
                break
        if not problems:
            raise FileNotFoundError(f"{self.root} has no checkpoint; start afresh, or look for the right directory")
        told = "\n".join(problems.values())
        raise DamagedCheckpoint(f"none of the {len(problems)} steps in {self.root} is whole:\n{told}")

    def _where(self, step: int) -> str:
        """Where a step lies. FileNotFoundError: there is none. DamagedCheckpoint: what leads to it cannot be read."""
        try:
            return self.url(step)
        except (OSError, ValueError) as error:
            kind = DamagedCheckpoint if step in self.steps() else FileNotFoundError
            raise kind(str(error)) from error


def log_file(root: str, rank: int) -> str | None:
    """Where the writer program of a rank says what it does; None beside an object store."""
    place = Root(root).files
    if not isinstance(place, PosixPlace):
        return None
    folder = os.path.join(place.path, ".logs")
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, f"writer-{rank:05d}.log")
