"""The checkpoints of a training run: steps in one directory, saved beside the training, found after anything."""

import contextlib
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, SupportsFloat

from core.dist_checkpointing.planning.exchange import (
    exchanged_cells,
    gather_json,
    held_cells,
    local_cells,
)
from core.dist_checkpointing.planning.prepare import SavePlan, Weights
from core.dist_checkpointing.planning.ranks import (
    DamagedCheckpoint,
    agree,
    default_state,
    from_first,
    problem_of,
)
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot, step_name
from core.dist_checkpointing.publish.lock import Lock
from core.dist_checkpointing.publish.retention import Retention, checked_metrics
from core.dist_checkpointing.reading.loading import load
from core.dist_checkpointing.reading.newest import load_newest
from core.dist_checkpointing.writing.async_save import (
    BackgroundCall,
    SaveStats,
    WriterProgram,
    log_file,
)
from core.dist_checkpointing.writing.job import Job
from core.dist_checkpointing.writing.saving import Saver
from core.dist_checkpointing.writing.slab import aligned
from core.dist_checkpointing.writing.staging import CopyBesideStep, PinnedStage
from core.parallel_state import ParallelState
from core.parallel_state.config import raise_all
from core.parallel_state.environment import has_streams
from core.parallel_state.flat import volume


class SaveHandle:
    """An asynchronous save under way. `stats.stall_ms` is what it cost the loop."""

    def __init__(self, step: int, manager: "CheckpointManager", job: Job, stats: SaveStats) -> None:
        self.step = step
        self.stats = stats
        self._manager = manager
        self._job = job

    def done(self) -> bool:
        """Whether it is over, committed or failed, on this rank."""
        return self._manager._has_ended(self, 0.0)

    def wait(self) -> None:
        """Block until it is committed. Raises RuntimeError: it failed (once; or the next save raises it)."""
        self._manager._has_ended(self, None)
        self._manager._raise_failure()


class CheckpointManager:
    """Saves steps under `root`, keeps the newest ones, and loads the newest that verifies. Collective throughout.

    keep_last, keep_every, keep_hours, keep_best (by the `metrics` that saves are given): see `Retention`.
    when_busy: what `save_async` does while a save is under way: "wait" for it (that is part of the stall), or "skip"
    this one. A step saved again replaces itself only when the new one is whole. run: facts for the manifest.
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
        self.root = str(root)
        self.when_busy = when_busy
        self.stale_s = stale_s
        self.timeout_s = timeout_s
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
        self._copy: BackgroundCall | CopyBesideStep | None = None
        self._stage: PinnedStage | None = None  # of an accelerator
        # of a save in the background, until it is raised once
        self._failure: str | None = None
        self._entered = False

    def note(self, facts: Mapping[str, Any]) -> None:
        """Facts for the manifests of all later saves, beside those of `run`."""
        self._saver.note(facts)

    def steps(self) -> list[int]:
        """Every committed step, ascending."""
        return CheckpointRoot(self.root).steps()

    def url(self, step: int) -> str:
        """Where a step lies. ValueError: there is none, with those that there are."""
        return CheckpointRoot(self.root).open(step).address

    # Saving

    def save(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> SaveStats:
        """Save a step and return when it is committed. Raises what went wrong, on all ranks (see `save`).

        metrics: name -> number, rank 0's are written into the manifest; `keep_best` compares them. ValueError: no
        numbers.
        """
        manifest_metrics = checked_metrics(metrics)
        self._enter_root()
        self._wait_for_save()
        return self._saver.save(step_name(step), state, self._obstacle(), manifest_metrics)

    def prepare(self, state: Any) -> None:
        """Before training: plan, warm memory, start the writer. The first save then stalls no longer than others."""
        self._enter_root()
        save_plan = self._saver.prepare(state)
        size = self._slab_bytes(save_plan)

        def warm_up() -> None:
            self._program().start(size)
            if (copy := self._copy_beside(save_plan)) is not None:
                copy.reserve()

        agree(problem_of(warm_up), self.ps)

    def save_async(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> SaveHandle | None:
        """Copy this rank's cells and return; a program of its own writes and commits them, also if this one dies.

        The state may change as soon as this returns (on an accelerator: as soon as `before_update` does). None: a
        save is under way, and `when_busy` says to skip. metrics: as `save`. Raises what went wrong with the save
        before, on all ranks.
        """
        begin = time.perf_counter()
        manifest_metrics = checked_metrics(metrics)
        self._enter_root()
        if self.when_busy == "skip" and self._busy():
            return None
        self._wait_for_save()
        save_plan = self._saver.prepare(state, self._obstacle())
        job = self._saver.job(step_name(step), save_plan, manifest_metrics)
        stats = SaveStats(bytes=self._slab_bytes(save_plan))
        ps = self.ps
        beside = list[CopyBesideStep]()

        def start() -> None:
            self._program().start(stats.bytes)
            if (copy := self._copy_beside(save_plan)) is not None:
                copy.reserve()
                beside.append(copy)
            if ps.rank == 0:
                job.begin()

        try:
            agree(problem_of(start), ps)
            program = self._program()
            # cells that need other ranks' shards first: a collective, which must not run beside the training's own
            exchanged = exchanged_cells(
                save_plan.plan, save_plan.arrays, save_plan.shards, ps.rank, ps.world, ps.device
            )
            program.copy(exchanged)
            for copy in beside:
                copy.start(program.copy, partial(program.begin, job))
        except BaseException:
            # an interrupt, too: nothing was handed over
            with contextlib.suppress(OSError, ValueError):
                job.withdraw()
            raise
        self._handle = SaveHandle(step, self, job, stats)
        stats.exchange_ms = 1e3 * (time.perf_counter() - begin)

        def copy_now() -> None:
            program.copy(local_cells(save_plan.plan, save_plan.arrays, save_plan.shards, ps.rank))
            program.begin(job)

        # on an accelerator the copies to the host overlap with the next forward; on a CPU nothing would be gained
        self._copy = beside[0] if beside else BackgroundCall(copy_now, threaded=False)
        stats.stall_ms = 1e3 * (time.perf_counter() - begin)
        return self._handle

    def before_update(self) -> None:
        """Before parameters change: the last `save_async` has copied them, or will have before the device goes on.

        On an accelerator its current stream waits for the copies; the host waits only for what lies on the host.
        """
        if isinstance(self._copy, CopyBesideStep):
            self._copy.before_update()
        # a copy that failed ends the save now, on all ranks
        if self._copy is not None and self._copy.done():
            self._finish_copy()

    def _finish_copy(self) -> None:
        """Block until the last `save_async` has copied everything and handed it over, or failed."""
        if self._copy is not None:
            copy = self._copy
            self._copy = None
            problem = problem_of(copy.wait)
            # nothing was handed over to the writer: this save is over
            if problem is not None:
                self._end_save(f"{type(problem).__name__}: {problem}")

    def _copy_beside(self, save_plan: SavePlan) -> CopyBesideStep | None:
        """On an accelerator: this rank's own cells, which are copied beside the step."""
        if not has_streams(self.ps.device):
            return None
        if self._stage is None:
            self._stage = PinnedStage(self.ps.device)
        cells = held_cells(save_plan.plan, save_plan.arrays, save_plan.shards, self.ps.rank)
        return CopyBesideStep(cells, self._stage)

    def _enter_root(self) -> None:
        """Once: take the lock, and finish or remove what killed jobs left. Collective."""
        if self._entered:
            return

        def enter() -> None:
            root = CheckpointRoot(self.root, stale_s=self.stale_s)
            self._lock = root.lock()
            root.wait_for_writers(self.timeout_s)
            root.sweep()

        agree(problem_of(enter) if self.ps.rank == 0 else None, self.ps)
        self._entered = True

    def _program(self) -> WriterProgram:
        if self.root.startswith("memory:"):
            raise ValueError(
                f"{self.root} lives in this process, the writer is another one: use save, not save_async"
            )
        if self._writer is None:
            self._writer = WriterProgram(log_file(self.root, self.ps.rank))
        return self._writer

    def _slab_bytes(self, save_plan: SavePlan) -> int:
        """What this rank's cells take in the slab."""
        size = 0
        for key, _, box in save_plan.plan.owned(self.ps.rank):
            size += aligned(volume(box) * save_plan.arrays[key].itemsize)
        return size

    def _busy(self) -> bool:
        """Collective: whether a save is under way on any rank."""
        busy = self._handle is not None and not self._has_ended(self._handle, 0.0)
        return any(gather_json(busy, self.ps.world, self.ps.device))

    def _wait_for_save(self) -> None:
        if self._handle is not None:
            self._has_ended(self._handle, None)

    def _has_ended(self, handle: SaveHandle, timeout_s: float | None) -> bool:
        """Whether that save is over; its failure is kept until it is raised."""
        if self._copy is not None and timeout_s == 0.0 and not self._copy.done():
            return False
        self._finish_copy()
        if handle is not self._handle:
            return True
        assert self._writer is not None
        try:
            error, handle.stats.seconds = self._writer.wait(timeout_s)
        except TimeoutError:
            return False
        self._end_save(error)
        return True

    def _end_save(self, error: str | None) -> None:
        """The save under way has ended; after a failure the other ranks' writers, which may wait, end it too."""
        assert self._handle is not None
        handle = self._handle
        self._handle = None
        if error is not None:
            self._failure = f"the save of step {handle.step} failed: {error}"
            # the temporary may be gone
            with contextlib.suppress(OSError):
                if self.ps.rank == 0:
                    handle._job.abandon()
                else:
                    handle._job.fail(error)

    def _obstacle(self) -> str | None:
        """Why this rank must not save: a failure that nobody has seen, a lock that another job took over."""
        failure = self._take_failure()
        if failure is None and self._lock is not None:
            lost_lock = problem_of(self._lock.check)
            failure = None if lost_lock is None else str(lost_lock)
        return failure

    def _take_failure(self) -> str | None:
        failure = self._failure
        self._failure = None
        return failure

    def _raise_failure(self) -> None:
        """Raises RuntimeError, once: the failure of a save in the background."""
        failure = self._take_failure()
        if failure is not None:
            raise RuntimeError(failure)

    def close(self) -> None:
        """Wait for the save under way, end the writer, give the lock back. Raises RuntimeError: that save failed."""
        self._wait_for_save()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._entered = False
        self._raise_failure()

    # Loading

    def load(self, step: int, template: Any, *, strict: bool = True) -> Any:
        """Read one step into the tensors of `template` (see `load`). ValueError: no such step; names those there."""

        def find() -> str:
            try:
                return self._address_of(step)
            except FileNotFoundError as error:
                raise ValueError(str(error)) from error

        # rank 0 looks for all: another rank's view of the directory may lag behind
        address = from_first(find, self.ps)
        return self._read(address, template, strict=strict)

    def load_latest(self, template: Any, *, strict: bool = True) -> tuple[int, Any]:
        """(step, state) of the newest step that verifies; damaged ones are left out, with a warning naming the file.

        Waits for a writer that a killed job left behind. Where another job removes the step that is read, the steps
        are listed again. Raises FileNotFoundError: no step at all. DamagedCheckpoint: none is whole; `template` then
        holds nothing defined. ValueError: the newest does not fit `template`.
        """

        def find() -> list[int]:
            CheckpointRoot(self.root, stale_s=self.stale_s).wait_for_writers(self.timeout_s)
            return self.steps()

        self._wait_for_save()
        # rank 0 lists the steps for all: directories of other hosts may lag behind
        return load_newest(
            self.root,
            from_first(find, self.ps),
            list_steps=lambda: from_first(self.steps, self.ps),
            load_step=lambda step: self._read(
                from_first(partial(self._address_of, step), self.ps), template, strict=strict
            ),
        )

    def _read(self, address: str, template: Any, *, strict: bool) -> Any:
        return load(template, address, strict=strict, ps=self.ps, share_reads=self.share_reads)

    def _address_of(self, step: int) -> str:
        """Where a step lies. FileNotFoundError: there is none. DamagedCheckpoint: what leads to it cannot be read."""
        try:
            return self.url(step)
        except (OSError, ValueError) as error:
            kind = DamagedCheckpoint if step in self.steps() else FileNotFoundError
            raise kind(str(error)) from error
