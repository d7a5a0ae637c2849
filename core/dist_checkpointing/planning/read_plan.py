"""Which rank reads what several ranks request, and whom it sends it to. No process, no torch.

Every rank computes the same plan. A cell that one rank requests is read by that rank. A unit (what shares a
checksum) that several ranks request is read once, by one of them, and sent to the others: storage delivers each byte
once, however many replicas there are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from core.dist_checkpointing.format.arrays import Holdings, Index, boxes_from_json
from core.dist_checkpointing.format.grid import cells
from core.dist_checkpointing.format.zarr_metadata import Chunking
from core.dist_checkpointing.planning.plan import padded_bytes
from core.parallel_state.flat import Box, flat_boxes, flat_intervals, intersect, volume

ROUND_BYTES = 64 << 20

# of one cell: each requested box of it -> the ranks that request it
Requesters = dict[Box, tuple[int, ...]]
# (box, the ranks that request it)
Deliveries = tuple[tuple[Box, tuple[int, ...]], ...]


class SharedRead(NamedTuple):
    """What `reader` reads of one cell, and which boxes of it go to which ranks, itself among them."""

    key: str
    cell: Index
    box: Box
    reader: int
    deliveries: Deliveries


@dataclass
class ReadPlan:
    """What concerns one rank, or all ranks.

    rounds: number of a round -> what is read and delivered in it. shared: key -> the cells that are read so.
    alone: (key, cell) -> (box, rank) of what only one rank requests of a shared cell. count: rounds of all ranks.
    """

    rounds: dict[int, list[SharedRead]] = field(default_factory=lambda: defaultdict(list))
    shared: dict[str, set[Index]] = field(default_factory=lambda: defaultdict(set))
    alone: dict[tuple[str, Index], list[tuple[Box, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    count: int = 0


def to_json(requested: Holdings) -> dict[str, Any]:
    """One rank's requests as a message: boxes inside of others once, equal lists of several arrays once."""
    # list of boxes -> its number in the message
    numbers: dict[tuple[Box, ...], int] = {}
    number_of_key = {}
    for key in sorted(requested):
        boxes = _joined_boxes(_outermost(_joined_boxes(requested[key])))
        number_of_key[key] = numbers.setdefault(boxes, len(numbers))
    return {"boxes": list(numbers), "lies": number_of_key}


def from_json(message: Mapping[str, Any]) -> Holdings:
    """The requested elements, as boxes, from what `to_json` made of them."""
    lists_of_boxes = [boxes_from_json(boxes) for boxes in message["boxes"]]
    return {key: lists_of_boxes[number] for key, number in message["lies"].items()}


def _outermost(boxes: Sequence[Box]) -> list[Box]:
    """Boxes that are not inside another: a weight is often requested together with its whole main parameter."""
    outermost: list[Box] = []
    for box in sorted(boxes, key=lambda box: (-volume(box), box)):
        if not any(intersect(box, outer) == box for outer in outermost):
            outermost.append(box)
    return outermost


def _joined_boxes(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """Boxes that continue each other in dim 0 as one: the layers of a stack."""
    joined: list[Box] = []
    for box in sorted(set(boxes), key=lambda box: (box[1:], box[:1])):
        previous = joined[-1] if joined else None
        if box and previous and previous[1:] == box[1:] and previous[0][1] == box[0][0]:
            joined[-1] = ((previous[0][0], box[0][1]), *box[1:])
        else:
            joined.append(box)
    return tuple(sorted(joined))


def plan_reads(
    chunks: Mapping[str, Chunking],
    requested: Sequence[Holdings],
    rank: int | None = None,
    *,
    round_bytes: int = ROUND_BYTES,
) -> ReadPlan:
    """Readers balanced by bytes, and rounds in which each rank reads, sends and receives at most `round_bytes`.

    requested: by every rank, in rank order. rank: keep what concerns it; None: all. One unit goes to all who request
    it in one round, and makes that round larger where very many request it.
    """
    # every rank runs through all cells, so that readers and rounds are the same; it keeps what concerns it
    plan = ReadPlan()
    rounds = _Rounds(len(requested), round_bytes)
    for keys in _array_classes(chunks, requested):
        array_chunks = chunks[keys[0]]
        boxes_by_rank = [rank_requests.get(keys[0], ()) for rank_requests in requested]
        for index, requesters in _cells_of_class(array_chunks, boxes_by_rank):
            if _is_shared(requesters):
                if rank is None or any(rank in ranks for ranks in requesters.values()):
                    for key in keys:
                        plan.shared[key].add(index)
                _plan_cell(plan, rounds, (array_chunks, keys, index, requesters), rank, round_bytes)
    plan.count = rounds.count
    return plan


def _plan_cell(
    plan: ReadPlan,
    rounds: "_Rounds",
    cell: tuple[Chunking, list[str], Index, Requesters],
    rank: int | None,
    round_bytes: int,
) -> None:
    """Adds the reads of one shared cell, given as (chunks, keys of its class, index, requesters), for every key."""
    chunks, keys, index, requesters = cell
    for units, boxes in _unit_runs(chunks, index, requesters):
        receivers = rounds.receivers(tuple([requesters[box] for box in boxes]))
        concerned = rank is None or rank in receivers.ranks
        single = len(receivers.ranks) == 1
        if single and not concerned:
            continue
        # a block is sent to all others within one round: its bytes times their number must fit
        block_bytes = round_bytes // max(1, len(receivers.ranks) - 1)
        for box, boxes_inside in _blocks_of_units(chunks, index, units, boxes, block_bytes):
            for key in keys:
                if single:
                    plan.alone[key, index].append((box, receivers.ranks[0]))
                    continue
                deliveries = tuple(
                    [(inside, requesters[request]) for inside, request in boxes_inside]
                )
                # all ranks' rounds are counted, also where `rank` is not concerned: the numbers must agree
                reader, number = rounds.add(receivers, box, deliveries, chunks.itemsize)
                if concerned:
                    plan.rounds[number].append(SharedRead(key, index, box, reader, deliveries))


def _is_shared(requesters: Requesters) -> bool:
    """Whether more than one rank requests something of a cell."""
    first_rank = next(iter(requesters.values()))[0]
    return any(len(ranks) > 1 or ranks[0] != first_rank for ranks in requesters.values())


def _array_classes(
    chunks: Mapping[str, Chunking], requested: Sequence[Holdings]
) -> list[list[str]]:
    """The keys of arrays of one geometry that the ranks request alike: their cells are cut once."""
    keys: set[str] = set()
    for rank_requests in requested:
        keys.update(rank_requests)
    classes: dict[Any, list[str]] = defaultdict(list)
    for key in sorted(keys):
        geometry = chunks[key]
        boxes_by_rank = tuple([rank_requests.get(key, ()) for rank_requests in requested])
        classes[
            geometry.shape, geometry.cell, geometry.unit, geometry.itemsize, boxes_by_rank
        ].append(key)
    return list(classes.values())


def _cells_of_class(
    chunks: Chunking, boxes_by_rank: Sequence[tuple[Box, ...]]
) -> Iterator[tuple[Index, Requesters]]:
    """Every requested cell, with which boxes of it are requested, and by which ranks."""
    # replicas request equal boxes: these are cut into cells once for all of them
    ranks_by_boxes: dict[tuple[Box, ...], list[int]] = defaultdict(list)
    for rank, boxes in enumerate(boxes_by_rank):
        ranks_by_boxes[boxes].append(rank)
    requesters_by_cell: dict[Index, Requesters] = defaultdict(dict)
    for boxes, ranks in ranks_by_boxes.items():
        for box in boxes:
            for index, cell in cells(chunks.shape, chunks.cell, box):
                overlap = intersect(box, cell)
                assert overlap is not None
                requesters = requesters_by_cell[index]
                earlier = requesters.get(overlap, ())
                requesters[overlap] = tuple(sorted({*earlier, *ranks})) if earlier else tuple(ranks)
    yield from sorted(requesters_by_cell.items())


def _unit_runs(
    chunks: Chunking, index: Index, requesters: Requesters
) -> Iterator[tuple[tuple[int, int], list[Box]]]:
    """Runs of units in C order that the same requests touch, as ((first, end), the requested boxes).

    A sweep: each requested box opens and closes at unit numbers; between two of these the open boxes do not change.
    """
    unit_grid = tuple([size // unit for size, unit in zip(chunks.cell, chunks.unit, strict=True)])
    # unit number -> (opens there, box)
    edges: dict[int, list[tuple[bool, Box]]] = defaultdict(list)
    for box in sorted(requesters):
        touched = []
        for (start, stop), position, size, unit in zip(
            box, index, chunks.cell, chunks.unit, strict=True
        ):
            origin = position * size
            touched.append(((start - origin) // unit, -(-(stop - origin) // unit)))
        for first, end in flat_intervals(unit_grid, tuple(touched)):
            edges[first].append((True, box))
            edges[end].append((False, box))
    # those that touch the units behind the last edge
    open_boxes: list[Box] = []
    previous_edge = 0
    for edge in sorted(edges):
        if open_boxes:
            yield (previous_edge, edge), list(open_boxes)
        for opens, box in edges[edge]:
            if opens:
                open_boxes.append(box)
            else:
                open_boxes.remove(box)
        previous_edge = edge


def _blocks_of_units(
    chunks: Chunking, index: Index, units: tuple[int, int], boxes: list[Box], block_bytes: int
) -> Iterator[tuple[Box, list[tuple[Box, Box]]]]:
    """A run of units in blocks of at most `block_bytes`, or of one unit.

    Of each block: the box that has to be read, and (overlap, requested box) of every request that it serves.
    """
    origin = [position * size for position, size in zip(index, chunks.cell, strict=True)]
    unit_grid = tuple([size // unit for size, unit in zip(chunks.cell, chunks.unit, strict=True)])
    units_per_block = max(1, block_bytes // chunks.unit_bytes)
    for first in range(*units, units_per_block):
        for box_of_units in flat_boxes(unit_grid, first, min(first + units_per_block, units[1])):
            scaled = zip(box_of_units, chunks.unit, origin, strict=True)
            block = tuple(
                [(start * unit + o, stop * unit + o) for (start, stop), unit, o in scaled]
            )
            overlaps = [(intersect(box, block), box) for box in boxes]
            served = [(overlap, box) for overlap, box in overlaps if overlap is not None]
            yield _bounding_box([overlap for overlap, _ in served]), served


def _bounding_box(boxes: Sequence[Box]) -> Box:
    """The smallest box around some boxes."""
    if len(boxes) == 1:
        return boxes[0]
    bounds = []
    for intervals in zip(*boxes, strict=True):
        starts, stops = zip(*intervals, strict=True)
        bounds.append((min(starts), max(stops)))
    return tuple(bounds)


class _Receivers:
    """All ranks that request any of some boxes, ascending."""

    def __init__(self, sets_of_ranks: Iterable[tuple[int, ...]]) -> None:
        self.ranks = tuple(sorted(set().union(*sets_of_ranks)))
        self._pick = itemgetter(*self.ranks)

    def pick(self, values: list[int]) -> tuple[int, ...]:
        """These ranks' values of a list by rank, in one call: often many ranks request the same."""
        if len(self.ranks) > 1:
            return self._pick(values)
        return (self._pick(values),)


class _Rounds:
    """The current round of each rank, and how many bytes it reads or sends, and receives, in that round."""

    def __init__(self, world: int, limit: int) -> None:
        self._limit = limit
        self.count = 0
        self._total_read = [0] * world  # bytes, in all rounds
        self._current = [0] * world
        # bytes, in the current round
        self._sent = [0] * world
        self._received = [0] * world
        self._receivers: dict[tuple[tuple[int, ...], ...], _Receivers] = {}

    def receivers(self, sets_of_ranks: tuple[tuple[int, ...], ...]) -> _Receivers:
        """Every rank of some sets of ranks; made once per combination."""
        if sets_of_ranks not in self._receivers:
            self._receivers[sets_of_ranks] = _Receivers(sets_of_ranks)
        return self._receivers[sets_of_ranks]

    def add(
        self, receivers: _Receivers, box: Box, deliveries: Deliveries, itemsize: int
    ) -> tuple[int, int]:
        """(reader, round) of one read: the rank that has read least, and the first round with room for all."""
        total_read = receivers.pick(self._total_read)
        reader = receivers.ranks[total_read.index(min(total_read))]
        read_bytes = volume(box) * itemsize
        self._total_read[reader] += read_bytes
        # one receiver gets all boxes at most
        receive_bytes = send_bytes = 0
        for part_box, ranks in deliveries:
            size = padded_bytes(part_box, itemsize)
            receive_bytes += size
            send_bytes += size * (len(ranks) - (reader in ranks))
        # the larger of two buffers limits the round: read, and sent
        send_bytes = max(read_bytes, send_bytes)
        # all receivers take part in one all-to-all: those in an earlier round move on to the latest one of them
        current = receivers.pick(self._current)
        number = max(current)
        if min(current) < number:
            self._enter(
                number,
                [
                    rank
                    for rank, its_round in zip(receivers.ranks, current, strict=True)
                    if its_round < number
                ],
            )
        busiest = max(receivers.pick(self._received))
        # an empty round takes everything: what is larger than a round has one of its own
        receivers_full = busiest and busiest + receive_bytes > self._limit
        reader_full = self._sent[reader] and self._sent[reader] + send_bytes > self._limit
        if receivers_full or reader_full:
            number += 1
            self._enter(number, receivers.ranks)
        for rank in receivers.ranks:
            self._received[rank] += receive_bytes
        self._received[reader] -= receive_bytes
        self._sent[reader] += send_bytes
        self.count = max(self.count, number + 1)
        return reader, number

    def _enter(self, number: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._current[rank], self._sent[rank], self._received[rank] = number, 0, 0
