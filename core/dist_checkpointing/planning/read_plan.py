"""Who reads what several ranks want, and whom it is given to: the same on every rank. No process, no torch.

A cell that one rank wants is read by that rank. What shares a checksum and is wanted by several is read once, by one
of them: storage gives each byte once, however many replicas there are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from core.dist_checkpointing.format.arrays import Holdings, Index
from core.dist_checkpointing.format.grid import cells
from core.dist_checkpointing.format.zarr_metadata import Chunks
from core.dist_checkpointing.planning.plan import wire_size
from core.parallel_state.flat import Box, flat_boxes, flat_intervals, intersect, volume

ROUND_BYTES = 64 << 20

Wants = tuple[tuple[Box, tuple[int, ...]], ...]  # box -> the ranks that want it


class Reading(NamedTuple):
    """What `reader` reads of one cell, and what of it goes to which ranks, itself among them."""

    key: str
    cell: Index
    box: Box
    reader: int
    wants: Wants


@dataclass
class ReadPlan:
    """What concerns one rank, or all. rounds: what is read and given out together, by number. shared: key -> the
    cells that are read so. alone: (key, cell) -> what of such a cell a rank wants alone, if it is this one."""

    rounds: dict[int, list[Reading]] = field(default_factory=lambda: defaultdict(list))
    shared: dict[str, set[Index]] = field(default_factory=lambda: defaultdict(set))
    alone: dict[tuple[str, Index], list[tuple[Box, int]]] = field(default_factory=lambda: defaultdict(list))
    count: int = 0  # of all rounds, of all ranks


def to_json(wanted: Holdings) -> dict[str, Any]:
    """What one rank tells of what it wants: boxes inside of others once, what several arrays have alike once."""
    boxes: dict[tuple[Box, ...], int] = {}
    lies = {key: boxes.setdefault(_joined(_largest(_joined(wanted[key]))), len(boxes)) for key in sorted(wanted)}
    return {"boxes": list(boxes), "lies": lies}


def from_json(told: Mapping[str, Any]) -> Holdings:
    """What it told: the elements that are wanted, in boxes."""
    boxes = [tuple([tuple(map(tuple, box)) for box in held]) for held in told["boxes"]]
    return {key: boxes[number] for key, number in told["lies"].items()}


def _largest(boxes: Sequence[Box]) -> list[Box]:
    """Those that are not inside another: a weight's is that of its main parameter's part, too."""
    kept: list[Box] = []
    for box in sorted(boxes, key=lambda box: (-volume(box), box)):
        if not any(intersect(box, other) == box for other in kept):
            kept.append(box)
    return kept


def _joined(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """One box for what lies behind each other in dim 0: layers of a stack."""
    joined: list[Box] = []
    for box in sorted(set(boxes), key=lambda box: (box[1:], box[:1])):
        if box and joined and joined[-1][1:] == box[1:] and joined[-1][0][1] == box[0][0]:
            joined[-1] = ((joined[-1][0][0], box[0][1]), *box[1:])
        else:
            joined.append(box)
    return tuple(sorted(joined))


def plan_reads(
    chunks: Mapping[str, Chunks],
    wanted: Sequence[Holdings],
    rank: int | None = None,
    *,
    round_bytes: int = ROUND_BYTES,
) -> ReadPlan:
    """Readers balanced by bytes, and rounds in which each rank reads, sends and receives at most `round_bytes`.

    wanted: by every rank, in rank order. rank: keep what concerns it; None: all. One piece goes to all who want it in
    one round, and makes that round larger where so many want it.
    """
    plan, rounds = ReadPlan(), _Rounds(len(wanted), round_bytes)
    for keys in _classes(chunks, wanted):
        at = chunks[keys[0]]
        for index, pieces in _cells_of_class(at, [held.get(keys[0], ()) for held in wanted]):
            if not _several(pieces):
                continue
            if rank is None or any(rank in ranks for ranks in pieces.values()):
                for key in keys:
                    plan.shared[key].add(index)
            for units, boxes in _runs(at, index, pieces):
                takers = rounds.takers(tuple([pieces[box] for box in boxes]))
                mine = rank is None or rank in takers.ranks
                if len(takers.ranks) == 1 and not mine:
                    continue
                for box, found in _blocks(at, index, units, boxes, round_bytes // max(1, len(takers.ranks) - 1)):
                    for key in keys:
                        if len(takers.ranks) == 1:
                            plan.alone[key, index].append((box, takers.ranks[0]))
                            continue
                        wants = tuple([(part, pieces[of]) for part, of in found])
                        reader, number = rounds.place(takers, box, wants, at.itemsize)
                        if mine:
                            plan.rounds[number].append(Reading(key, index, box, reader, wants))
    plan.count = rounds.count
    return plan


def _several(pieces: Mapping[Box, tuple[int, ...]]) -> bool:
    """Whether more than one rank wants something of a cell."""
    first = next(iter(pieces.values()))[0]
    return any(len(ranks) > 1 or ranks[0] != first for ranks in pieces.values())


def _classes(chunks: Mapping[str, Chunks], wanted: Sequence[Holdings]) -> list[list[str]]:
    """Keys of one geometry that the ranks want alike: planned once."""
    alike: dict[Any, list[str]] = defaultdict(list)
    for key in sorted({key for held in wanted for key in held}):
        at = chunks[key]
        boxes = tuple([held.get(key, ()) for held in wanted])
        alike[at.shape, at.cell, at.unit, at.itemsize, boxes].append(key)
    return list(alike.values())


def _cells_of_class(
    chunks: Chunks, wanted: Sequence[tuple[Box, ...]]
) -> Iterator[tuple[Index, dict[Box, tuple[int, ...]]]]:
    """Every cell that somebody wants, with what is wanted of it, and by which ranks."""
    ranks_of: dict[tuple[Box, ...], list[int]] = defaultdict(list)  # replicas are cut once
    for rank, boxes in enumerate(wanted):
        ranks_of[boxes].append(rank)
    pieces: dict[Index, dict[Box, tuple[int, ...]]] = defaultdict(dict)
    for boxes, ranks in ranks_of.items():
        for box in boxes:
            for index, cell in cells(chunks.shape, chunks.cell, box):
                piece = intersect(box, cell)
                assert piece is not None
                before = pieces[index].get(piece, ())
                pieces[index][piece] = tuple(sorted({*before, *ranks})) if before else tuple(ranks)
    yield from sorted(pieces.items())


def _runs(
    chunks: Chunks, index: Index, pieces: Mapping[Box, tuple[int, ...]]
) -> Iterator[tuple[tuple[int, int], list[Box]]]:
    """Numbers of units (what shares a checksum), in C order, that the same boxes touch; and those boxes."""
    grid = tuple([n // unit for n, unit in zip(chunks.cell, chunks.unit, strict=True)])
    edges: dict[int, list[tuple[bool, Box]]] = defaultdict(list)
    for box in sorted(pieces):
        inside = zip(box, index, chunks.cell, chunks.unit, strict=True)
        touched = tuple([((a - i * n) // unit, -(-(b - i * n) // unit)) for (a, b), i, n, unit in inside])
        for start, stop in flat_intervals(grid, touched):
            edges[start].append((True, box))
            edges[stop].append((False, box))
    open_boxes: list[Box] = []
    before = 0
    for at in sorted(edges):
        if open_boxes:
            yield (before, at), list(open_boxes)
        for begins, box in edges[at]:
            open_boxes.append(box) if begins else open_boxes.remove(box)
        before = at


def _blocks(
    chunks: Chunks, index: Index, units: tuple[int, int], boxes: list[Box], most_bytes: int
) -> Iterator[tuple[Box, list[tuple[Box, Box]]]]:
    """A run as boxes of at most `most_bytes`, or of one unit: what of it is needed, and (part, the box it is of)."""
    origin = [i * n for i, n in zip(index, chunks.cell, strict=True)]
    grid = tuple([n // unit for n, unit in zip(chunks.cell, chunks.unit, strict=True)])
    step = max(1, most_bytes // chunks.unit_bytes)
    for start in range(*units, step):
        for flat in flat_boxes(grid, start, min(start + step, units[1])):
            scaled = zip(flat, chunks.unit, origin, strict=True)
            block = tuple([(a * unit + o, b * unit + o) for (a, b), unit, o in scaled])
            found = [(part, box) for box in boxes if (part := intersect(box, block)) is not None]
            yield _around([part for part, _ in found]), found


def _around(boxes: Sequence[Box]) -> Box:
    if len(boxes) == 1:
        return boxes[0]
    return tuple([(min(a for a, _ in dim), max(b for _, b in dim)) for dim in zip(*boxes, strict=True)])


class _Takers:
    """All ranks that want any of these pieces, ascending."""

    def __init__(self, sets: Iterable[tuple[int, ...]]) -> None:
        self.ranks = tuple(sorted({rank for ranks in sets for rank in ranks}))
        self._get = itemgetter(*self.ranks)

    def of(self, values: list[int]) -> tuple[int, ...]:
        """Their values: all ranks' at once, since many want one thing."""
        return self._get(values) if len(self.ranks) > 1 else (self._get(values),)


class _Rounds:
    """How far each rank is: its round, and what it reads or sends, and receives, in that."""

    def __init__(self, world: int, limit: int) -> None:
        self._limit, self.count = limit, 0
        self._read = [0] * world  # in all rounds
        self._at, self._sent, self._received = [0] * world, [0] * world, [0] * world
        self._takers: dict[tuple[tuple[int, ...], ...], _Takers] = {}

    def takers(self, sets: tuple[tuple[int, ...], ...]) -> _Takers:
        """Every rank of some sets of ranks."""
        if sets not in self._takers:
            self._takers[sets] = _Takers(sets)
        return self._takers[sets]

    def place(self, takers: _Takers, box: Box, wants: Wants, itemsize: int) -> tuple[int, int]:
        """(reader, round) of one reading: the one that has read least, and the first round with room for all."""
        so_far = takers.of(self._read)
        reader = takers.ranks[so_far.index(min(so_far))]
        size = volume(box) * itemsize
        self._read[reader] += size
        most = sum([wire_size(part, itemsize) for part, _ in wants])  # to each
        sent = max(size, sum([wire_size(part, itemsize) * (len(ranks) - (reader in ranks)) for part, ranks in wants]))
        rounds = takers.of(self._at)
        at = max(rounds)
        if min(rounds) < at:
            self._enter(at, [rank for rank, n in zip(takers.ranks, rounds, strict=True) if n < at])
        full = max(takers.of(self._received))
        if (full and full + most > self._limit) or (self._sent[reader] and self._sent[reader] + sent > self._limit):
            at += 1
            self._enter(at, takers.ranks)
        for rank in takers.ranks:
            self._received[rank] += most
        self._received[reader] -= most
        self._sent[reader] += sent
        self.count = max(self.count, at + 1)
        return reader, at

    def _enter(self, number: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._at[rank], self._sent[rank], self._received[rank] = number, 0, 0
