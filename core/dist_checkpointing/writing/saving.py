"""Save: each rank writes the cells it owns, nothing is gathered, a checkpoint appears as a whole or not at all."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from core import __version__
from core.dist_checkpointing.planning.exchange import owned_cells
from core.dist_checkpointing.planning.prepare import SavePlan, SavePlanner, Weights
from core.dist_checkpointing.planning.ranks import agree, default_state, problem_of
from core.dist_checkpointing.publish.retention import Retention
from core.dist_checkpointing.storage.address import root_and_name
from core.dist_checkpointing.writing.async_save import SaveStats
from core.dist_checkpointing.writing.job import Job
from core.parallel_state import ParallelState


class Saver:
    """Synchronous saves of one job into one root; the plan is kept from one to the next.

    run: what the manifest says of the run. timeout_s: how long a rank may take before the save is given up.
    """

    def __init__(
        self,
        root: str,
        ps: ParallelState,
        *,
        run: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        weights: Weights = "derive",
        retention: Retention | None = None,
        durable: bool = True,
    ) -> None:
        self.root = root
        self.ps = ps
        self.timeout_s = timeout_s
        self.retention = retention
        self.durable = durable
        self._run = {
            "layout": layout_of_ranks(ps),
            "world_size": ps.config.world_size,
            "paracore": __version__,
        }
        self._run |= dict(run or {})
        self._planner = SavePlanner(ps, weights)

    def note(self, facts: Mapping[str, Any]) -> None:
        """The manifests of all later saves say this too."""
        self._run |= dict(facts)

    def prepare(self, state: Any, failure: str | None = None) -> SavePlan:
        """Agree with all ranks on what is saved by whom. Collective."""
        return self._planner.prepare(state, failure=failure)

    def job(
        self, name: str, save_plan: SavePlan, metrics: Mapping[str, float] | None = None
    ) -> Job:
        """This rank's share of a save. metrics: written into the manifest."""
        run = dict(self._run)
        if metrics:
            run["metrics"] = dict(metrics)
        run["time"] = time.time()
        return Job(
            root=self.root,
            name=name,
            uuid=save_plan.uuid,
            rank=self.ps.rank,
            world_size=self.ps.config.world_size,
            metadata=save_plan.metadata,
            attributes=save_plan.attributes,
            run=run,
            nbytes=save_plan.nbytes,
            timeout_s=self.timeout_s,
            retention=asdict(self.retention) if self.retention is not None else None,
            durable=self.durable,
        )

    def save(
        self,
        name: str,
        state: Any,
        failure: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveStats:
        """Collective; returns once it is committed. Raises what went wrong, on all ranks, with the rank named."""
        begin = time.perf_counter()
        save_plan = self.prepare(state, failure)
        job = self.job(name, save_plan, metrics)
        written_bytes = 0
        ps = self.ps
        cells = owned_cells(
            save_plan.plan, save_plan.arrays, save_plan.shards, ps.rank, ps.world, ps.device
        )

        def write() -> None:
            nonlocal written_bytes
            try:
                written_bytes = job.write(cells)
            except Exception:
                # the other ranks still need what this one sends: without it they would hang in the exchange
                for _ in cells:
                    pass
                raise

        committing = False
        try:
            # rank 0 makes the temporary directory, all write their cells, then rank 0 commits; each step on all
            # ranks or on none
            agree(problem_of(job.begin) if ps.rank == 0 else None, ps)
            agree(problem_of(write), ps)
            committing = True
            agree(problem_of(job.conclude if ps.rank == 0 else job.merge), ps)
        except BaseException:  # an interrupt, too
            # once it is committing, only rank 0 knows whether there is something to withdraw
            if ps.rank == 0 or not committing:
                # the first error is the one to be raised
                with contextlib.suppress(OSError, ValueError):
                    job.withdraw()
            raise
        seconds = time.perf_counter() - begin
        return SaveStats(stall_ms=1e3 * seconds, bytes=written_bytes, seconds=seconds)


def layout_of_ranks(ps: ParallelState) -> dict[str, int]:
    """axis -> size, for the manifest."""
    return {axis: ps.sizes[axis] for axis in ("pp", "dp", "cp", "tp", "ep")}


def save(
    sharded_state_dict: Any,
    checkpoint_dir: str | Path,
    *,
    ps: ParallelState | None = None,
    weights: Weights = "derive",
    run: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
) -> SaveStats:
    """Write one checkpoint; collective over all ranks. A checkpoint already there is replaced, at the very end.

    sharded_state_dict: nested dicts of sharded tensors and objects (`model.sharded_state_dict()`); plain tensors and
    values are the same on all ranks. weights: "derive" leaves 16-bit weights out where they are the main parameters
    rounded, bit for bit; "bf16" stores them in any case, for a release.
    Raises, on all ranks, with the guilty one named: ValueError (a state that cannot be saved), DiskFullError,
    OSError; what lay there before is intact then.
    """
    root, name = root_and_name(checkpoint_dir)
    if ps is None:
        ps = default_state()
    return Saver(root, ps, run=run, timeout_s=timeout_s, weights=weights).save(
        name, sharded_state_dict
    )
