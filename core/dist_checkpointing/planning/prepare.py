"""What all ranks agree on before a save: catalogue, plan, attempt. One small exchange, if nothing changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal
from uuid import uuid4

from core.dist_checkpointing.format.arrays import Arrays
from core.dist_checkpointing.format.grid import cell_of, inner_shape
from core.dist_checkpointing.format.zarr_metadata import Json, array_metadata
from core.dist_checkpointing.planning.exchange import gather_json
from core.dist_checkpointing.planning.plan import Plan, plan_writes
from core.dist_checkpointing.publish.manifest import FORMAT, TAGGED
from core.dist_checkpointing.state.catalog import (
    Catalog,
    LocalState,
    completed,
    digest,
    flatten,
    merge,
    merge_objects,
    merge_plain,
    shortened,
    to_json,
)
from core.dist_checkpointing.state.derive import left_out, unequal
from core.dist_checkpointing.state.leaves import tagged
from core.dist_checkpointing.state.mapping import Piece
from core.dist_checkpointing.state.optimizers import to_save
from core.parallel_state import ParallelState

Weights = Literal["derive", "bf16"]


@dataclass(frozen=True)
class SavePlan:
    """A save that can begin. arrays, metadata: what is stored. attributes: of the root group. parts: this rank's."""

    uuid: str
    plan: Plan
    arrays: Arrays
    metadata: Mapping[str, Json]
    attributes: Mapping[str, Any]
    parts: Mapping[str, Sequence[Piece]]

    @property
    def nbytes(self) -> int:
        """Of all arrays, on all ranks together."""
        return sum(prod(info.shape) * info.itemsize for info in self.arrays.values())


class SavePlanner:
    """Keeps catalogue and plan from save to save, as long as no rank's part changes."""

    def __init__(self, ps: ParallelState, weights: Weights = "derive") -> None:
        if weights not in ("derive", "bf16"):
            raise ValueError(
                f"weights={weights!r} is unknown: 'derive' leaves out what can be rounded, 'bf16' does not"
            )
        self._ps, self._weights = ps, weights
        self._digests: list[str] = []
        self._catalog: Catalog | None = None
        self._plan: tuple[Plan, Arrays, Mapping[str, Json]] | None = None
        self._left_out: set[str] = set()

    def prepare(self, state: Any, *, failure: str | None = None) -> SavePlan:
        """Collective. `failure`: why this rank must not save (an earlier save failed); told to all.

        Raises ValueError on all ranks alike: a state that cannot be saved, parts that do not make wholes.
        RuntimeError: a rank's `failure`.
        """
        flat, problem = LocalState(), None
        local: dict[str, Any] = {}
        mine: dict[str, Any] = {}
        try:
            flat = flatten(to_save(state))
            local = to_json(flat.arrays(), flat.holdings())
            mine = {
                "digest": digest(local),
                "kind": digest(local["arrays"]),
                "objects": digest(flat.objects),
                "unequal": unequal(flat),
            }
            mine["same"] = flat.plain_digests(self._ps.config.world_size)
        except Exception as error:
            problem = error
        told = self._gather(mine | {"uuid": uuid4().hex, "problem": problem and str(problem), "failure": failure})
        for rank, said in enumerate(told):
            if said["failure"]:
                raise RuntimeError(f"rank {rank}: {said['failure']}")
            if problem is not None and rank == self._ps.rank:
                raise problem
            if said["problem"] is not None:
                raise ValueError(f"rank {rank}: {said['problem']}")
        alike = len({said["objects"] for said in told}) == 1  # else each tells them: an optimizer's are many
        objects = flat.objects if alike else merge_objects(self._gather(flat.objects))
        if (digests := [said["digest"] for said in told]) != self._digests:
            kinds = [said["kind"] for said in told]
            every = self._gather(shortened(local, self._ps.rank, kinds))
            self._catalog, self._plan = merge(completed(every, kinds)), None
            self._digests = digests
        merge_plain([said["same"] for said in told])
        stored = {key for said in told for key in said["unequal"]}
        plan, arrays, metadata, table = self._planned(stored)
        facts = {"format": TAGGED if tagged(list(objects.values())) else FORMAT, "objects": objects, "derived": table}
        parts = {key: [part.piece for part in held] for key, held in flat.parts.items() if key in arrays}
        return SavePlan(told[0]["uuid"], plan, arrays, metadata, {"paracore": facts}, parts)

    def _gather(self, value: Any) -> list[Any]:
        return gather_json(value, self._ps.world, self._ps.device)

    def _planned(self, stored: set[str]) -> tuple[Plan, Arrays, Mapping[str, Json], dict[str, Any]]:
        assert self._catalog is not None
        keys, table = left_out(self._catalog.arrays, stored) if self._weights == "derive" else (set(), {})
        if self._plan is None or self._left_out != keys:
            kept, self._left_out = self._catalog.without(keys), keys
            metadata = {}
            for key, info in kept.arrays.items():
                cell = cell_of(info)
                metadata[key] = array_metadata(info, cell, inner_shape(cell))
            self._plan = plan_writes(kept.arrays, kept.holdings), kept.arrays, metadata
        return *self._plan, table
