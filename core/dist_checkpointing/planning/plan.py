"""Which rank writes which cell of a save, and what the ranks send each other before. No process, no torch.

Every rank computes the same plan from the same integers, so nobody has to send it. Arrays of one shape that lie on
the ranks alike (a parameter's float32 main weights and its moments) form a class: their cells are cut once, but each
array's cells have owners of their own, so that all ranks share the writing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import NamedTuple

from core.dist_checkpointing.format.arrays import ArrayInfo, Arrays, Holdings, Index
from core.dist_checkpointing.format.grid import cell_name, cell_of, cells
from core.parallel_state.flat import Box, intersect, volume

WAVE_BYTES = 64 << 20
# bytes: where a transfer starts in a message, so that it can be viewed in its own dtype
TRANSFER_ALIGN = 16

# of one cell: each box of it that ranks hold -> those ranks
Holders = dict[Box, tuple[int, ...]]
# ranks -> every (key, box) that exactly these hold, where they are several
Replicas = Mapping[tuple[int, ...], Sequence[tuple[str, Box]]]


class Transfer(NamedTuple):
    """A box of one cell that `source` holds and `destination` writes; `box` counts from the array's origin.

    Transfers of one message are sorted, so that both ends agree on the order without telling each other.
    """

    key: str
    cell: Index
    box: Box
    source: int
    destination: int


@dataclass(frozen=True)
class WritePlan:
    """cells: key -> (index, box, owner) of every cell in C order. waves: the sorted transfers of each all-to-all."""

    cells: Mapping[str, Sequence[tuple[Index, Box, int]]]
    waves: list[list[Transfer]]
    replicas: Replicas = field(default_factory=dict)

    def owned(self, rank: int) -> list[tuple[str, Index, Box]]:
        """The cells that `rank` writes, as (key, index, box), sorted."""
        owned_cells = []
        for key in sorted(self.cells):
            for index, box, owner in self.cells[key]:
                if owner == rank:
                    owned_cells.append((key, index, box))
        return owned_cells


@dataclass(frozen=True)
class _PlannedCell:
    """One cell of every array of a class, and who holds what of it.

    received: owner -> (box, sender) of all that it does not hold itself; computed once for each owner.
    """

    index: Index
    box: Box
    holders: Holders
    received: dict[int, list[tuple[Box, int]]] = field(default_factory=dict)

    @cached_property
    def disjoint(self) -> bool:
        """Whether no two held boxes overlap: then their volumes add up to the cell's."""
        return sum(map(volume, self.holders)) == volume(self.box)

    @cached_property
    def candidates(self) -> list[int]:
        """The ranks that may own the cell."""
        return _candidates(self.holders)


def plan_writes(
    arrays: Arrays, holdings: Sequence[Holdings], *, wave_bytes: int = WAVE_BYTES
) -> WritePlan:
    """Owners balanced by bytes, and the exchange in waves of at most `wave_bytes` sent and received per rank.

    holdings: of every rank, in rank order. A rank writes what it holds: among the ranks that hold at least half as
    much of a cell as its largest holder, the least loaded becomes the owner. A transfer larger than `wave_bytes` has
    a wave of its own.
    Raises ValueError: boxes of one rank that overlap or leave the array, elements that no rank holds.
    """
    unassigned = []
    # classes are cut once, however many arrays they have: the costly part for thousands of ranks
    replicas: dict[tuple[int, ...], list[tuple[str, Box]]] = defaultdict(list)
    for keys in _array_classes(arrays, holdings).values():
        for cell in _cells_of_class(keys, arrays, holdings):
            elements = volume(cell.box)
            unassigned += [(elements * arrays[key].itemsize, key, cell) for key in keys]
        for box, ranks in _holders_of_boxes(keys[0], holdings).items():
            if len(ranks) > 1:
                replicas[tuple(ranks)] += [(key, box) for key in keys]
    # the largest cells first: greedy balancing is then off by one small cell at most. Key and index break all ties,
    # so that every rank computes the same plan
    unassigned.sort(key=lambda item: (-item[0], item[1], item[2].index))
    load = [0] * len(holdings)  # rank -> bytes that it writes
    assigned: dict[str, list[tuple[Index, Box, int]]] = {key: [] for key in sorted(arrays)}
    transfers = []
    for size, key, cell in unassigned:
        owner = min(cell.candidates, key=lambda rank: (load[rank], rank))
        load[owner] += size
        assigned[key].append((cell.index, cell.box, owner))
        if owner not in cell.received:
            cell.received[owner] = _received(cell, owner)
        for box, source in cell.received[owner]:
            transfers.append(Transfer(key, cell.index, box, source, owner))
    for cells_of_array in assigned.values():
        cells_of_array.sort()
    waves = _waves_of_transfers(transfers, arrays, len(holdings), wave_bytes)
    return WritePlan(assigned, waves, dict(replicas))


def plan_gathering(
    arrays: Arrays, holdings: Sequence[Holdings], rank: int, *, wave_bytes: int = WAVE_BYTES
) -> dict[tuple[str, Index], WritePlan]:
    """How `rank` gets each layer of a stack, and each other array, as one cell: (key, index) -> a plan of that alone.

    holdings, wave_bytes, errors: as `plan_writes`. What `rank` does not hold itself, its replicas' holders send.
    """

    def grid_of(info: ArrayInfo) -> tuple[int, ...]:
        if info.stacked:
            return (1, *info.shape[1:])
        return info.shape

    plans = {}
    for keys in _array_classes(arrays, holdings).values():
        for cell in _cells_of_class(keys, arrays, holdings, grid_of):
            received = _received(cell, rank)
            for key in keys:
                transfers = [
                    Transfer(key, cell.index, box, source, rank) for box, source in received
                ]
                waves = _waves_of_transfers(transfers, arrays, len(holdings), wave_bytes)
                plans[key, cell.index] = WritePlan({key: [(cell.index, cell.box, rank)]}, waves)
    return plans


def transfer_bytes(box: Box, info: ArrayInfo) -> int:
    """The bytes that a box of an array takes in a message, padding included."""
    return padded_bytes(box, info.itemsize)


def padded_bytes(box: Box, itemsize: int) -> int:
    """The bytes of a box in a message, rounded up to `TRANSFER_ALIGN`; elements of `itemsize` bytes."""
    return -(-volume(box) * itemsize // TRANSFER_ALIGN) * TRANSFER_ALIGN


def _array_classes(arrays: Arrays, holdings: Sequence[Holdings]) -> dict[str, list[str]]:
    """First key -> all keys of each class. Raises ValueError: a rank holds an array that is not among `arrays`."""
    for rank, rank_holdings in enumerate(holdings):
        if unknown := sorted(rank_holdings.keys() - arrays.keys()):
            raise ValueError(
                f"rank {rank} holds {', '.join(unknown)}, not among the {len(arrays)} arrays to save"
            )
    classes: dict[tuple, list[str]] = defaultdict(list)
    for key in sorted(arrays):
        info = arrays[key]
        boxes_by_rank = tuple([rank_holdings.get(key, ()) for rank_holdings in holdings])
        classes[info.shape, info.tp_dim, info.stacked, info.ragged, boxes_by_rank].append(key)
    return {keys[0]: keys for keys in classes.values()}


def _holders_of_boxes(key: str, holdings: Sequence[Holdings]) -> dict[Box, list[int]]:
    """Each box that ranks hold of an array, in rank order -> those ranks."""
    holders: dict[Box, list[int]] = {}
    for rank, rank_holdings in enumerate(holdings):
        for box in rank_holdings.get(key, ()):
            holders.setdefault(box, []).append(rank)
    return holders


def _cells_of_class(
    keys: list[str],
    arrays: Arrays,
    holdings: Sequence[Holdings],
    grid_of: Callable[[ArrayInfo], tuple[int, ...]] = cell_of,
) -> Iterator[_PlannedCell]:
    """Every cell of a class in C order. Raises ValueError: a box outside of the array, elements that nobody holds."""
    key = keys[0]
    info = arrays[keys[0]]
    try:
        grid = grid_of(info)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    # replicas hold equal boxes: these are cut into cells once for all of them
    ranks_by_boxes: dict[tuple[Box, ...], list[int]] = defaultdict(list)
    for rank, rank_holdings in enumerate(holdings):
        ranks_by_boxes[rank_holdings.get(key, ())].append(rank)
    holders_by_cell: dict[Index, Holders] = defaultdict(dict)
    for boxes, ranks in ranks_by_boxes.items():
        _check_boxes(key, info.shape, boxes, ranks[0])
        for box in boxes:
            for index, cell in cells(info.shape, grid, box):
                overlap = intersect(box, cell)
                assert overlap is not None
                holders = holders_by_cell[index]
                holders[overlap] = (*holders.get(overlap, ()), *ranks)
    for index, cell in cells(info.shape, grid):
        holders = holders_by_cell[index]
        if cell not in holders and (hole := _box_without(cell, sorted(holders))):
            raise ValueError(
                f"{key} of shape {info.shape}: no rank holds {hole[0]} (in cell {cell_name(index)}); every element "
                f"has to be in the sharded state of at least one of the {len(holdings)} ranks"
            )
        yield _PlannedCell(index, cell, holders)


def _check_boxes(key: str, shape: tuple[int, ...], boxes: tuple[Box, ...], rank: int) -> None:
    """Raises ValueError: a box that is empty or leaves the array, two boxes of one rank that overlap."""
    # sorted by first row, a box can only overlap earlier ones that reach into its rows: a sweep, not all pairs
    reaching: list[Box] = []
    for box in sorted(boxes):
        inside = all(
            0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=False)
        )
        if len(box) != len(shape) or not inside:
            raise ValueError(
                f"rank {rank} holds {box} of {key}, which is empty or not inside its shape {shape}"
            )
        if box:
            reaching = [earlier for earlier in reaching if earlier[0][1] > box[0][0]]
        for earlier in reaching:
            if intersect(earlier, box) is not None:
                raise ValueError(
                    f"rank {rank} holds {earlier} and {box} of {key}, which overlap: name each element once"
                )
        reaching.append(box)


def _candidates(holders: Holders) -> list[int]:
    """The ranks that hold at least half of what the largest holder holds."""
    elements_of_rank: dict[int, int] = defaultdict(int)
    for box, ranks in holders.items():
        elements = volume(box)
        for rank in ranks:
            elements_of_rank[rank] += elements
    largest = max(elements_of_rank.values())
    return [rank for rank, elements in elements_of_rank.items() if 2 * elements >= largest]


def _received(cell: _PlannedCell, owner: int) -> list[tuple[Box, int]]:
    """Disjoint boxes that the owner lacks, each with the rank that sends it; replicas take turns.

    Boxes of different ranks may overlap: pipeline stages that share an embedding may cut it in different places.
    """
    received: list[tuple[Box, int]] = []
    # the common case needs no arithmetic of boxes: every box that the owner does not hold is sent as it is
    if cell.disjoint:
        for box, ranks in cell.holders.items():
            if owner not in ranks:
                received.append((box, _chosen_sender(ranks, owner)))
        return received
    # what the owner holds itself counts first, then the large boxes: few transfers
    by_preference = sorted(
        cell.holders.items(),
        key=lambda holding: (owner not in holding[1], -volume(holding[0]), holding[0]),
    )
    covered: list[Box] = []
    for box, ranks in by_preference:
        if owner not in ranks:
            sender = _chosen_sender(ranks, owner)
            received += [(rest, sender) for rest in _box_without(box, covered)]
        covered.append(box)
    return received


def _chosen_sender(ranks: tuple[int, ...], owner: int) -> int:
    """One of the ranks that hold the same box: different owners ask different replicas."""
    return sorted(ranks)[owner % len(ranks)]


def _box_without(box: Box, removed: Iterable[Box]) -> list[Box]:
    """What remains of a box without `removed`, as disjoint boxes."""
    remaining = [box]
    for other in removed:
        if not remaining:
            break
        remaining = [rest for uncut in remaining for rest in _difference(uncut, other)]
    return remaining


def _difference(box: Box, other: Box) -> list[Box]:
    """Disjoint boxes of all elements of `box` that are not in `other`."""
    common = intersect(box, other)
    if common is None:
        return [box]
    rest = []
    # dim by dim the slabs before and after the common interval; dims before it are already cut to the common box
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, common, strict=True)):
        if start < first:
            rest.append((*common[:dim], (start, first), *box[dim + 1 :]))
        if last < stop:
            rest.append((*common[:dim], (last, stop), *box[dim + 1 :]))
    return rest


def _waves_of_transfers(
    transfers: list[Transfer], arrays: Arrays, world: int, wave_bytes: int
) -> list[list[Transfer]]:
    """Transfers in waves that no rank sends or receives more than `wave_bytes` in.

    Each destination receives its cells in order and all destinations take turns, so that at any time at most one
    cell of each rank is incomplete in memory.
    """
    queue = []
    # destination -> its transfers so far
    queued: Counter[int] = Counter()
    for transfer in sorted(transfers):
        queue.append((queued[transfer.destination], transfer.destination, transfer))
        queued[transfer.destination] += 1
    waves: list[list[Transfer]] = []
    sent: list[list[int]] = []  # wave -> bytes of each rank
    received: list[list[int]] = []
    # of each destination: where its last transfer is, earlier ones would break the order
    last_wave = [0] * world
    for _, destination, transfer in sorted(queue):
        size = transfer_bytes(transfer.box, arrays[transfer.key])
        # the first wave with room on both sides, not before the one of the destination's last transfer
        for wave in count(last_wave[destination]):
            if wave == len(waves):
                waves.append([])
                sent.append([0] * world)
                received.append([0] * world)
            busiest = max(sent[wave][transfer.source], received[wave][destination])
            if not busiest or busiest + size <= wave_bytes:
                break
        last_wave[destination] = wave
        waves[wave].append(transfer)
        sent[wave][transfer.source] += size
        received[wave][destination] += size
    return [sorted(wave) for wave in waves]
