"""Reading for all ranks together: one rank reads what several request, and sends it to them.

`read`, which reads for one rank alone, is the plain twin.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from core.dist_checkpointing.format.arrays import Index
from core.dist_checkpointing.format.zarr_metadata import Chunking
from core.dist_checkpointing.planning.exchange import exchange, gather_json, shards_as_bits
from core.dist_checkpointing.planning.plan import Transfer
from core.dist_checkpointing.planning.ranks import problem_of
from core.dist_checkpointing.planning.read_plan import (
    ReadPlan,
    SharedRead,
    from_json,
    plan_reads,
    to_json,
)
from core.dist_checkpointing.reading.direct import fastest_reader
from core.dist_checkpointing.reading.read import (
    BUDGET,
    Staged,
    Target,
    by_cell,
    read,
    stage,
    torch_dtype,
)
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.storage.zarr_store import Reader
from core.parallel_state import ParallelState
from core.parallel_state.flat import Box, intersect, relative, slices

Requests = Mapping[str, Sequence[Target]]
# key -> cell -> this rank's targets in it
CellTargets = Mapping[str, Mapping[Index, list[Target]]]


def read_once(
    stored: StoredCheckpoint, requested: Requests, ps: ParallelState, *, verify: bool = True
) -> None:
    """`read` on all ranks: no byte that several request is read twice. Collective, also where a rank fails.

    A rank holds at most 64 MiB each of what it read, reads ahead, sends and receives (more where one chunk of 1 MiB
    goes to more than 64 ranks). Raises ValueError, on the rank that found it: what is damaged, by file.
    """
    local_requests = {}
    for key, targets in requested.items():
        if targets:
            local_requests[key] = tuple([box for box, _ in targets])
    messages = gather_json(to_json(local_requests), ps.world, ps.device)
    requests_by_rank = [from_json(message) for message in messages]
    keys: set[str] = set().union(*requests_by_rank)
    chunks = {key: Chunking.from_metadata(stored.metadata[key]) for key in keys}
    # all ranks plan from the same requests, so no plan is sent
    plan = plan_reads(chunks, requests_by_rank, ps.rank)
    cell_targets = {key: by_cell(stored, key, requested[key]) for key in plan.shared}
    problem = _ReadRounds(stored, plan, cell_targets, ps, verify).run()
    if problem is not None:
        raise problem
    # no rank waits for another any more
    read(stored, _unshared(plan, requested, cell_targets), verify=verify)


def _unshared(
    plan: ReadPlan, requested: Requests, cell_targets: CellTargets
) -> dict[str, list[Target]]:
    """What no other rank requests."""
    unshared = {key: list(targets) for key, targets in requested.items() if key not in cell_targets}
    for key, targets_by_cell in cell_targets.items():
        unshared[key] = []
        for index, targets in targets_by_cell.items():
            if index not in plan.shared[key]:
                unshared[key] += targets
        # of a shared cell, the boxes that this rank alone requests
        for index in plan.shared[key]:
            for box, _ in plan.alone.get((key, index), ()):
                unshared[key] += _targets_inside(targets_by_cell[index], box)
    return unshared


def _targets_inside(targets: Sequence[Target], box: Box) -> list[Target]:
    """The targets, cut to what of them lies in a box."""
    inside = []
    for target_box, memory in targets:
        overlap = intersect(target_box, box)
        if overlap is not None:
            inside.append((overlap, memory[slices(relative(overlap, target_box))]))
    return inside


class _ReadRounds:
    """One rank's share of the rounds of a plan: read, send, receive."""

    def __init__(
        self,
        stored: StoredCheckpoint,
        plan: ReadPlan,
        cell_targets: CellTargets,
        ps: ParallelState,
        verify: bool,
    ) -> None:
        self._stored = stored
        self._plan = plan
        self._cell_targets = cell_targets
        self._ps = ps
        self._arrays = {key: stored.info(key) for key in plan.shared}
        files = stored.manifest.files if verify else None
        self._reader = fastest_reader(stored.directory, stored.metadata, files, budget_bytes=BUDGET)
        self._checks = verify and isinstance(self._reader, Reader)

    def run(self) -> Exception | None:
        """Collective. Returns what went wrong on this rank.

        A rank that cannot read goes on to exchange, so that nobody waits for it (a deadlock): what it sends then is
        undefined, and in the end all ranks raise.
        """
        problem = None
        reading = list[tuple[str, Staged]]()
        # one round more than there are: while round n - 1 is exchanged, round n is being read (prefetch)
        for number in range(self._plan.count + 1):
            finished = reading
            reading = self._staged_for(number)
            if problem is None:
                problem = problem_of(partial(self._finish_and_start, finished, reading))
            if number:
                self._exchange(self._plan.rounds.get(number - 1, []), finished)
        return problem or problem_of(self._check)

    def _staged_for(self, number: int) -> list[tuple[str, Staged]]:
        """Memory for what this rank reads in a round, as (key, memory)."""
        staged = []
        for shared_read in self._plan.rounds.get(number, []):
            if shared_read.reader == self._ps.rank:
                key = shared_read.key
                box = shared_read.box
                dtype = torch_dtype(self._arrays[key].dtype)
                targets = _targets_inside(self._cell_targets[key][shared_read.cell], box)
                staged.append((key, stage(box, dtype, targets)))
        return staged

    def _finish_and_start(
        self, finished: list[tuple[str, Staged]], started: list[tuple[str, Staged]]
    ) -> None:
        """Waits for the reads of one round and starts those of the next, which run during the exchange."""
        self._reader.finish()
        for key, staged in started:
            self._reader.read(key, staged.box, staged.array)
        for _, staged in finished:
            staged.copy_to_targets()

    def _exchange(self, shared_reads: list[SharedRead], staged: list[tuple[str, Staged]]) -> None:
        """Collective: sends what this rank read in a round, and copies what it receives into its targets."""
        staged_by_key: dict[str, list[Staged]] = {}
        for key, one_staged in staged:
            staged_by_key.setdefault(key, []).append(one_staged)
        transfers: list[Transfer] = []
        for shared_read in shared_reads:
            transfers += self._transfers(shared_read)
        shards = shards_as_bits(self._arrays, staged_by_key)
        ps = self._ps
        # in one order on all ranks, so that what is sent meets what is received
        for transfer, bits in exchange(
            sorted(transfers), self._arrays, shards, ps.rank, ps.world, ps.device
        ):
            data = bits.view(torch_dtype(self._arrays[transfer.key].dtype))
            targets = self._cell_targets[transfer.key][transfer.cell]
            for box, target in _targets_inside(targets, transfer.box):
                target.copy_(data[slices(relative(box, transfer.box))])

    def _transfers(self, shared_read: SharedRead) -> Iterator[Transfer]:
        """What of it this rank sends, or receives."""
        key, cell, _, reader, deliveries = shared_read
        for box, ranks in deliveries:
            if reader == self._ps.rank:
                receivers = [rank for rank in ranks if rank != reader]
            else:
                receivers = [rank for rank in ranks if rank == self._ps.rank]
            for receiver in receivers:
                yield Transfer(key, cell, box, reader, receiver)

    def _check(self) -> None:
        """The cells that this rank read, where its reader does not check them itself."""
        cells_read = set()
        for shared_reads in self._plan.rounds.values():
            for shared_read in shared_reads:
                if shared_read.reader == self._ps.rank:
                    cells_read.add((shared_read.key, shared_read.cell))
        with self._stored.checker(enabled=self._checks) as checker:
            for key, cell in cells_read:
                checker.add(key, cell)
