"""What all ranks agree on before a save: catalogue, plan, attempt. One small exchange, if nothing changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal
from uuid import uuid4

from core.dist_checkpointing.format.arrays import Arrays, Holdings
from core.dist_checkpointing.format.grid import cell_of, inner_shape
from core.dist_checkpointing.format.zarr_metadata import Json, array_metadata
from core.dist_checkpointing.planning.exchange import gather_json
from core.dist_checkpointing.planning.plan import WritePlan, plan_writes
from core.dist_checkpointing.planning.replicas import (
    buffer_words,
    compare_replicas,
    tell_of_buffers,
)
from core.dist_checkpointing.publish.manifest import FORMAT, TAGGED
from core.dist_checkpointing.state.catalog import (
    Catalog,
    LocalCatalog,
    LocalState,
    fingerprint,
    flatten,
    merge_catalogs,
    merge_objects,
    to_json,
    with_repeated_arrays,
    without_repeated_arrays,
)
from core.dist_checkpointing.state.derive import derivable, unequal_weights
from core.dist_checkpointing.state.leaves import tagged
from core.dist_checkpointing.state.mapping import Shard
from core.dist_checkpointing.state.optimizers import to_save
from core.parallel_state import ParallelState

Weights = Literal["derive", "bf16"]
_Planned = tuple[WritePlan, Arrays, Mapping[str, Json], Sequence[Holdings]]


@dataclass(frozen=True)
class SavePlan:
    """A save that can begin, the same on all ranks but for `shards`.

    uuid: of this attempt. arrays, metadata: what is stored. attributes: of the root group. shards: this rank's.
    holdings: which boxes each rank holds, in rank order.
    """

    uuid: str
    plan: WritePlan
    arrays: Arrays
    metadata: Mapping[str, Json]
    attributes: Mapping[str, Any]
    shards: Mapping[str, Sequence[Shard]]
    holdings: Sequence[Holdings]

    @property
    def nbytes(self) -> int:
        """Of all arrays, on all ranks together."""
        return sum(prod(info.shape) * info.itemsize for info in self.arrays.values())


def _held(local_state: LocalState, holdings: Holdings) -> dict[str, list[Shard]]:
    """The shards of this rank that count: without what is not stored, or counts on a rank before it."""
    shards = {}
    for key, boxes in holdings.items():
        if boxes:
            shards[key] = [
                tensor.shard for tensor in local_state.shards[key] if tensor.box in boxes
            ]
    return shards


class SavePlanner:
    """Keeps catalogue and plan from save to save, as long as no rank's shards change."""

    def __init__(self, ps: ParallelState, weights: Weights = "derive") -> None:
        if weights not in ("derive", "bf16"):
            raise ValueError(
                f"weights={weights!r} is unknown: 'derive' leaves out what can be rounded, 'bf16' does not"
            )
        self._ps = ps
        self._weights = weights
        # of every rank's catalogue, at the save before
        self._fingerprints: list[str] = []
        self._catalog: Catalog | None = None
        self._plan: _Planned | None = None
        self._not_stored: set[str] = set()

    def prepare(self, state: Any, *, failure: str | None = None) -> SavePlan:
        """Collective. `failure`: why this rank must not save (an earlier save failed); raised on all ranks.

        Raises ValueError on all ranks alike: a state that cannot be saved, shards that do not cover their arrays.
        RuntimeError: a rank's `failure`.
        """
        local_state = LocalState()
        problem = None
        catalog: LocalCatalog = {}
        report: dict[str, Any] = {}
        try:
            local_state = flatten(to_save(state))
            catalog = to_json(local_state.arrays(), local_state.holdings(), local_state.from_first)
            report = self._report(local_state, catalog)
            report["buffers"] = buffer_words(local_state, self._ps)
        except Exception as error:
            # reported to all ranks first: they wait in the exchange
            problem = error
        report |= {"uuid": uuid4().hex, "problem": problem and str(problem), "failure": failure}
        reports = self._gather(report)
        self._raise_problems(reports, problem)
        tell_of_buffers([report["buffers"] for report in reports], self._ps)
        # an optimizer's objects are many: they are sent only where the fingerprints differ
        objects = local_state.objects
        if len({report["objects"] for report in reports}) > 1:
            objects = merge_objects(self._gather(objects))
        self._update_catalog(catalog, reports)
        stored_weights: set[str] = set().union(*[report["unequal"] for report in reports])
        (plan, arrays, metadata, holdings), derived = self._planned(stored_weights)
        version = TAGGED if tagged(list(objects.values())) else FORMAT
        facts = {"format": version, "objects": objects, "derived": derived}
        shards = _held(local_state, holdings[self._ps.rank])
        compare_replicas(plan.replicas, shards, self._ps)
        # rank 0's uuid names the attempt on all ranks
        return SavePlan(
            reports[0]["uuid"], plan, arrays, metadata, {"paracore": facts}, shards, holdings
        )

    def _report(self, local_state: LocalState, catalog: LocalCatalog) -> dict[str, Any]:
        """What this rank sends at every save: fingerprints of what is long and seldom changes."""
        return {
            "digest": fingerprint(catalog),
            "kind": fingerprint(catalog["arrays"]),
            "objects": fingerprint(local_state.objects),
            "unequal": unequal_weights(local_state),
        }

    def _raise_problems(self, reports: list[dict[str, Any]], problem: Exception | None) -> None:
        """The first rank's failure or problem, on all ranks; a rank with a problem of its own raises that itself."""
        for rank, report in enumerate(reports):
            if report["failure"]:
                raise RuntimeError(f"rank {rank}: {report['failure']}")
            if problem is not None and rank == self._ps.rank:
                raise problem
            if report["problem"] is not None:
                raise ValueError(f"rank {rank}: {report['problem']}")

    def _update_catalog(self, catalog: LocalCatalog, reports: list[dict[str, Any]]) -> None:
        """Collective where any rank's catalogue changed since the last save: all ranks see it in the reports."""
        fingerprints = [report["digest"] for report in reports]
        if fingerprints != self._fingerprints:
            kinds = [report["kind"] for report in reports]
            catalogs = self._gather(without_repeated_arrays(catalog, self._ps.rank, kinds))
            self._catalog = merge_catalogs(with_repeated_arrays(catalogs, kinds))
            self._plan = None
            self._fingerprints = fingerprints

    def _gather(self, value: Any) -> list[Any]:
        return gather_json(value, self._ps.world, self._ps.device)

    def _planned(self, stored_weights: set[str]) -> tuple[_Planned, dict[str, Any]]:
        """(plan, arrays, their metadata, who holds what of them; how to derive what is not stored).

        `stored_weights` cannot be derived.
        """
        assert self._catalog is not None
        not_stored: set[str] = set()
        derived: dict[str, Any] = {}
        if self._weights == "derive":
            not_stored, derived = derivable(self._catalog.arrays, stored_weights)
        if self._plan is None or self._not_stored != not_stored:
            # planned anew only where the set changes: weights edited by hand, a frozen parameter
            self._not_stored = not_stored
            catalog = self._catalog.without(not_stored)
            metadata = {}
            for key, info in catalog.arrays.items():
                cell = cell_of(info)
                metadata[key] = array_metadata(info, cell, inner_shape(cell))
            plan = plan_writes(catalog.arrays, catalog.holdings)
            self._plan = plan, catalog.arrays, metadata, catalog.holdings
        return self._plan, derived
