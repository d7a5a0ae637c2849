"""Reading for all ranks together: what several want one reads, and sends to the others. `read` is the plain twin."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from core.dist_checkpointing.format.arrays import Index
from core.dist_checkpointing.format.zarr_metadata import Chunks
from core.dist_checkpointing.planning.exchange import exchange, gather_json, shards_as_bits
from core.dist_checkpointing.planning.plan import Transfer
from core.dist_checkpointing.planning.ranks import problem_of
from core.dist_checkpointing.planning.read_plan import SharedRead, ReadPlan, from_json, plan_reads, to_json
from core.dist_checkpointing.reading.direct import fastest_reader
from core.dist_checkpointing.reading.read import BUDGET, Staged, Target, by_cell, read, stage, torch_dtype
from core.dist_checkpointing.reading.stored import Stored
from core.dist_checkpointing.storage.zarr_store import Reader
from core.parallel_state import ParallelState
from core.parallel_state.flat import Box, intersect, relative, slices

Wanted = Mapping[str, Sequence[Target]]
Cells = Mapping[str, Mapping[Index, list[Target]]]


def read_once(stored: Stored, wanted: Wanted, ps: ParallelState, *, verify: bool = True) -> None:
    """`read` on all ranks: no byte that several want is read twice. Collective, also where a rank fails.

    A rank holds at most 64 MiB each of what it read, reads ahead, sends and receives (more where one piece of 1 MiB
    goes to more than 64 ranks). Raises ValueError, on the rank that found it: what is damaged, by file.
    """
    boxes = {key: tuple(box for box, _ in targets) for key, targets in wanted.items()}
    mine = to_json({key: held for key, held in boxes.items() if held})
    everyone = [from_json(one) for one in gather_json(mine, ps.world, ps.device)]
    chunks = {key: Chunks.of(stored.metadata[key]) for held in everyone for key in held}
    plan = plan_reads(chunks, everyone, ps.rank)
    cells = {key: by_cell(stored, key, wanted[key]) for key in plan.shared}
    problem = _Rounds(stored, plan, cells, ps, verify).run()
    if problem is not None:
        raise problem
    read(stored, _alone(plan, wanted, cells), verify=verify)


def _alone(plan: ReadPlan, wanted: Wanted, cells: Cells) -> dict[str, list[Target]]:
    """What no other rank wants."""
    left = {key: list(targets) for key, targets in wanted.items() if key not in cells}
    for key, of_key in cells.items():
        left[key] = [target for index, parts in of_key.items() if index not in plan.shared[key] for target in parts]
        for index in plan.shared[key]:
            for box, _ in plan.alone.get((key, index), ()):
                left[key] += _inside(of_key[index], box)
    return left


def _inside(targets: Sequence[Target], box: Box) -> list[Target]:
    """The parts of targets that lie in a box."""
    found = []
    for at, memory in targets:
        if (both := intersect(at, box)) is not None:
            found.append((both, memory[slices(relative(both, at))]))
    return found


class _Rounds:
    """One rank's share of the rounds of a plan. cells: key -> cell -> this rank's targets in it."""

    def __init__(self, stored: Stored, plan: ReadPlan, cells: Cells, ps: ParallelState, verify: bool) -> None:
        self._stored, self._plan, self._cells, self._ps = stored, plan, cells, ps
        self._arrays = {key: stored.info(key) for key in plan.shared}
        files = stored.manifest.files if verify else None
        self._reader = fastest_reader(stored.place, stored.metadata, files, budget_bytes=BUDGET)
        self._checks = verify and isinstance(self._reader, Reader)

    def run(self) -> Exception | None:
        """Collective. A rank that cannot read goes on to exchange, so that nobody waits for it: what it sends then is
        undefined, and in the end all are told."""
        problem, ahead = None, list[tuple[str, Staged]]()
        for number in range(self._plan.count + 1):
            staged, ahead = ahead, self._mine(number)
            if problem is None:
                problem = problem_of(partial(self._read, staged, ahead))
            if number:
                self._exchange(self._plan.rounds.get(number - 1, []), staged)
        return problem or problem_of(self._check)

    def _mine(self, number: int) -> list[tuple[str, Staged]]:
        """Memory for what this rank reads in a round."""
        found = []
        for reading in self._plan.rounds.get(number, []):
            if reading.reader == self._ps.rank:
                dtype = torch_dtype(self._arrays[reading.key].dtype)
                targets = _inside(self._cells[reading.key][reading.cell], reading.box)
                found.append((reading.key, stage(reading.box, dtype, targets)))
        return found

    def _read(self, staged: list[tuple[str, Staged]], ahead: list[tuple[str, Staged]]) -> None:
        """Waits for what was begun, and begins what comes next: it is read beside the exchange."""
        self._reader.finish()
        for key, piece in ahead:
            self._reader.read(key, piece.box, piece.array)
        for _, piece in staged:
            piece.give_out()

    def _exchange(self, readings: list[SharedRead], staged: list[tuple[str, Staged]]) -> None:
        parts: dict[str, list[Staged]] = {}
        for key, piece in staged:
            parts.setdefault(key, []).append(piece)
        wave = sorted(transfer for reading in readings for transfer in self._fragments(reading))
        held = shards_as_bits(self._arrays, parts)
        for transfer, bits in exchange(wave, self._arrays, held, self._ps.rank, self._ps.world, self._ps.device):
            data = bits.view(torch_dtype(self._arrays[transfer.key].dtype))
            for box, target in _inside(self._cells[transfer.key][transfer.cell], transfer.box):
                target.copy_(data[slices(relative(box, transfer.box))])

    def _fragments(self, reading: SharedRead) -> Iterator[Transfer]:
        """What of it this rank sends or receives."""
        me, (key, cell, _, reader, wants) = self._ps.rank, reading
        for box, ranks in wants:
            for taker in ranks if me == reader else [me] * (me in ranks):
                if taker != reader:
                    yield Transfer(key, cell, box, reader, taker)

    def _check(self) -> None:
        """The cells that this rank read, where their reader cannot."""
        every = (reading for readings in self._plan.rounds.values() for reading in readings)
        with self._stored.checker(enabled=self._checks) as checker:
            for key, cell in {(one.key, one.cell) for one in every if one.reader == self._ps.rank}:
                checker.add(key, cell)
