"""Who writes which cell, and which fragments change rank before: the same on every rank. No process, no torch.

Arrays that have one geometry and lie on the ranks alike (a parameter's float32 main copy and its moments) form a
class: cut once; each array's cells have owners of their own.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import NamedTuple

from core.dist_checkpointing.format.arrays import ArrayInfo, Arrays, Holdings, Index
from core.dist_checkpointing.format.grid import cell_name, cell_of, cells
from core.parallel_state.flat import Box, intersect, volume

WAVE_BYTES = 64 << 20
FRAGMENT_ALIGN = 16  # bytes: where a fragment starts in a message, so that it can be viewed in its own dtype

Pieces = dict[Box, tuple[int, ...]]  # what is held of one cell: box -> the ranks that hold it


class Fragment(NamedTuple):
    """A part of one cell that `source` holds and `destination` writes; `box` counts from the array's origin.

    A message holds them sorted.
    """

    key: str
    cell: Index
    box: Box
    source: int
    destination: int


@dataclass(frozen=True)
class Plan:
    """cells: key -> (index, box, owner) of every cell in C order. waves: what each exchange carries, sorted."""

    cells: Mapping[str, Sequence[tuple[Index, Box, int]]]
    waves: list[list[Fragment]]

    def owned(self, rank: int) -> list[tuple[str, Index, Box]]:
        """The cells that `rank` writes, sorted."""
        return [(key, at, box) for key in sorted(self.cells) for at, box, owner in self.cells[key] if owner == rank]


@dataclass(frozen=True)
class _Cell:
    """A cell of every array of a class. moved: owner -> what it lacks, and who sends that."""

    index: Index
    box: Box
    pieces: Pieces
    moved: dict[int, list[tuple[Box, int]]] = field(default_factory=dict)

    @cached_property
    def disjoint(self) -> bool:
        """Whether no two pieces overlap: together they are the cell, and no larger."""
        return sum(map(volume, self.pieces)) == volume(self.box)

    @cached_property
    def candidates(self) -> list[int]:
        """Who may own it."""
        return _candidates(self.pieces)


def make_plan(arrays: Arrays, holdings: Sequence[Holdings], *, wave_bytes: int = WAVE_BYTES) -> Plan:
    """Owners balanced by bytes, and the exchange in waves of at most `wave_bytes` sent and received per rank.

    holdings: of every rank, in rank order. A rank writes what it holds; of ranks that hold at least half as much of
    a cell as the one that holds most, the least loaded. A fragment larger than `wave_bytes` has a wave of its own.
    Raises ValueError: boxes of one rank that overlap or leave the array, elements that no rank holds.
    """
    classes = _classes(arrays, holdings)
    todo = [
        (volume(cell.box) * arrays[key].itemsize, key, cell)
        for keys in classes.values()
        for cell in _cells_of_class(keys, arrays, holdings)
        for key in keys
    ]
    todo.sort(key=lambda item: (-item[0], item[1], item[2].index))
    load = [0] * len(holdings)
    planned: dict[str, list[tuple[Index, Box, int]]] = {key: [] for key in sorted(arrays)}
    fragments = []
    for size, key, cell in todo:
        owner = min(cell.candidates, key=lambda rank: (load[rank], rank))
        load[owner] += size
        planned[key].append((cell.index, cell.box, owner))
        if owner not in cell.moved:
            cell.moved[owner] = _moved(cell, owner)
        fragments += [Fragment(key, cell.index, box, source, owner) for box, source in cell.moved[owner]]
    for of_key in planned.values():
        of_key.sort()
    return Plan(planned, _waves(fragments, arrays, len(holdings), wave_bytes))


def wire_bytes(box: Box, info: ArrayInfo) -> int:
    """What a fragment takes in a message."""
    return wire_size(box, info.itemsize)


def wire_size(box: Box, itemsize: int) -> int:
    """The same, of elements of that size."""
    return -(-volume(box) * itemsize // FRAGMENT_ALIGN) * FRAGMENT_ALIGN


def _classes(arrays: Arrays, holdings: Sequence[Holdings]) -> dict[str, list[str]]:
    """First key -> all keys of each class. Raises ValueError: a rank holds an array that is not among `arrays`."""
    for rank, held in enumerate(holdings):
        if unknown := sorted(held.keys() - arrays.keys()):
            raise ValueError(f"rank {rank} holds {', '.join(unknown)}, not among the {len(arrays)} arrays to save")
    alike: dict[tuple, list[str]] = defaultdict(list)
    for key in sorted(arrays):
        info = arrays[key]
        boxes = tuple([held.get(key, ()) for held in holdings])
        alike[info.shape, info.tp_dim, info.stacked, info.ragged, boxes].append(key)
    return {keys[0]: keys for keys in alike.values()}


def _cells_of_class(keys: list[str], arrays: Arrays, holdings: Sequence[Holdings]) -> Iterator[_Cell]:
    key, info = keys[0], arrays[keys[0]]
    try:
        grid = cell_of(info)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    ranks_of: dict[tuple[Box, ...], list[int]] = defaultdict(list)  # replicas are cut once
    for rank, held in enumerate(holdings):
        ranks_of[held.get(key, ())].append(rank)
    pieces: dict[Index, Pieces] = defaultdict(dict)
    for boxes, ranks in ranks_of.items():
        _check_boxes(key, info.shape, boxes, ranks[0])
        for box in boxes:
            for index, cell in cells(info.shape, grid, box):
                piece = intersect(box, cell)
                assert piece is not None
                pieces[index][piece] = (*pieces[index].get(piece, ()), *ranks)
    for index, cell in cells(info.shape, grid):
        if cell not in pieces[index] and (hole := _without(cell, sorted(pieces[index]))):
            raise ValueError(
                f"{key} of shape {info.shape}: no rank holds {hole[0]} (in cell {cell_name(index)}); every element "
                f"has to be in the sharded state of at least one of the {len(holdings)} ranks"
            )
        yield _Cell(index, cell, pieces[index])


def _check_boxes(key: str, shape: tuple[int, ...], boxes: tuple[Box, ...], rank: int) -> None:
    ahead: list[Box] = []  # of the boxes so far, those that reach the rows of the next one
    for box in sorted(boxes):
        inside = all(0 <= start < stop <= n for (start, stop), n in zip(box, shape, strict=False))
        if len(box) != len(shape) or not inside:
            raise ValueError(f"rank {rank} holds {box} of {key}, which is empty or not inside its shape {shape}")
        ahead = [other for other in ahead if other[0][1] > box[0][0]] if box else ahead
        if twice := [other for other in ahead if intersect(other, box) is not None]:
            raise ValueError(
                f"rank {rank} holds {twice[0]} and {box} of {key}, which overlap: name each element once"
            )
        ahead.append(box)


def _candidates(pieces: Pieces) -> list[int]:
    """The ranks that hold at least half of what the largest holder holds."""
    held: dict[int, int] = defaultdict(int)
    for box, ranks in pieces.items():
        elements = volume(box)
        for rank in ranks:
            held[rank] += elements
    most = max(held.values())
    return [rank for rank, elements in held.items() if 2 * elements >= most]


def _moved(cell: _Cell, owner: int) -> list[tuple[Box, int]]:
    """Disjoint boxes that the owner lacks, each with the rank that sends it; replicas take turns.

    Pieces of different ranks may overlap: stages that share an embedding cut it in different places.
    """
    if cell.disjoint:
        pieces = cell.pieces.items()
        return [(box, sorted(ranks)[owner % len(ranks)]) for box, ranks in pieces if owner not in ranks]
    moved: list[tuple[Box, int]] = []
    covered: list[Box] = []
    for box, ranks in sorted(cell.pieces.items(), key=lambda held: (owner not in held[1], -volume(held[0]), held[0])):
        if owner not in ranks:
            moved += [(part, sorted(ranks)[owner % len(ranks)]) for part in _without(box, covered)]
        covered.append(box)
    return moved


def _without(box: Box, others: Iterable[Box]) -> list[Box]:
    """What is left of a box, as disjoint boxes."""
    left = [box]
    for other in others:
        if not left:
            break
        left = [part for whole in left for part in _difference(whole, other)]
    return left


def _difference(box: Box, other: Box) -> list[Box]:
    common = intersect(box, other)
    if common is None:
        return [box]
    parts = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, common, strict=True)):
        around = [(start, first)] * (start < first) + [(last, stop)] * (last < stop)
        parts += [(*common[:dim], side, *box[dim + 1 :]) for side in around]
    return parts


def _waves(fragments: list[Fragment], arrays: Arrays, world: int, wave_bytes: int) -> list[list[Fragment]]:
    """Each destination takes its cells in order, all destinations in turn: at most one cell of each is half there."""
    turn: Counter[int] = Counter()
    queue = []
    for fragment in sorted(fragments):
        queue.append((turn[fragment.destination], fragment.destination, fragment))
        turn[fragment.destination] += 1
    waves: list[list[Fragment]] = []
    sent: list[list[int]] = []  # wave -> bytes of each rank
    received: list[list[int]] = []
    at = [0] * world  # the wave of each destination's last fragment
    for _, to, fragment in sorted(queue):
        size = wire_bytes(fragment.box, arrays[fragment.key])
        for wave in count(at[to]):
            if wave == len(waves):
                waves.append([])
                sent.append([0] * world)
                received.append([0] * world)
            busiest = max(sent[wave][fragment.source], received[wave][to])
            if not busiest or busiest + size <= wave_bytes:
                break
        at[to] = wave
        waves[wave].append(fragment)
        sent[wave][fragment.source] += size
        received[wave][to] += size
    return [sorted(wave) for wave in waves]
