"""Runs a plan: fragments travel as bits in waves, whole cells come out."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.format.arrays import STORED, ArrayInfo, Arrays, Index
from core.dist_checkpointing.planning.plan import Fragment, Plan, wire_bytes
from core.parallel_state.collectives import Group, all_gather, all_to_all
from core.parallel_state.flat import Box, extent, intersect, relative, slices, volume

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers: no copy touches a NaN's payload
BITS[16] = torch.complex128  # there is no wider integer


class Part(Protocol):
    """A piece of an array in this rank's memory."""

    @property
    def box(self) -> Box:
        """Where in the array."""
        ...

    @property
    def data(self) -> Tensor:
        """The elements: exactly the box's extent, with any strides, on any device."""
        ...


Parts = Mapping[str, Sequence[Part]]
OwnedCell = tuple[str, Index, Box, np.ndarray]


def owned_cells(
    plan: Plan, arrays: Arrays, parts: Parts, rank: int, group: Group | None, device: torch.device | str = "cpu"
) -> Iterator[OwnedCell]:
    """Collective: every rank exhausts it, or the others hang. Each cell that `rank` owns, once, as stored.

    Those that need nobody come first, then wave by wave those that became whole.
    """
    yield from local_cells(plan, arrays, parts, rank)
    yield from exchanged_cells(plan, arrays, parts, rank, group, device)


def local_cells(plan: Plan, arrays: Arrays, parts: Parts, rank: int) -> Iterator[OwnedCell]:
    """The cells that `rank` owns and holds: views of parts (any strides) where one part on the CPU covers them.

    Raises ValueError: a part that is not of its array's dtype or not of its box's shape, parts that are not what the
    plan was made from.
    """
    held = held_parts(arrays, parts)
    awaited = {(f.key, f.cell) for wave in plan.waves for f in wave if f.destination == rank}
    for key, index, box in plan.owned(rank):
        if (key, index) not in awaited:
            yield key, index, box, _local(key, arrays[key], held.get(key, ()), box)


def exchanged_cells(
    plan: Plan, arrays: Arrays, parts: Parts, rank: int, group: Group | None, device: torch.device | str = "cpu"
) -> Iterator[OwnedCell]:
    """Collective: every rank exhausts it. The cells that `rank` makes of what others send; they are the caller's.

    group: of all ranks of the plan, None for a single process. device: where the group's messages live.
    Raises ValueError: as `local_cells`.
    """
    held = held_parts(arrays, parts)
    boxes = {(key, index): box for key, index, box in plan.owned(rank)}
    begun: dict[tuple[str, Index], np.ndarray] = {}
    missing: dict[tuple[str, Index], int] = {}
    for wave in plan.waves:
        for fragment, elements in exchange(wave, arrays, held, rank, group, device):
            key, index = at = fragment.key, fragment.cell
            if at not in begun:
                begun[at], missing[at] = _assembled(arrays[key], held.get(key, ()), boxes[at])
            begun[at][slices(relative(fragment.box, boxes[at]))] = _stored(elements, arrays[key])
            missing[at] -= volume(fragment.box)
            if not missing[at]:
                yield key, index, boxes[at], begun.pop(at)
    for key, index in begun:
        raise _lacking(key, boxes[key, index], missing[key, index])


def gather_json(value: Any, group: Group | None, device: torch.device | str = "cpu") -> list[Any]:
    """Collective: one JSON value of every rank, in rank order, as it reads back. device: of the group's messages."""
    text = json.dumps(value).encode()
    sizes = all_gather(torch.tensor([len(text)], device=device), group).tolist()
    padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8).to(device)
    everyone = all_gather(padded, group).cpu().numpy().reshape(len(sizes), -1)
    return [json.loads(row.tobytes()) for row in everyone]


@dataclass(frozen=True)
class Held:
    """A part as integers of its dtype's size; array: the same memory as it is stored, None if not on the CPU.

    Made once per part: a view by torch costs more than a small cell's write.
    """

    box: Box
    bits: Tensor
    array: np.ndarray | None

    def cut(self, box: Box) -> Tensor:
        """The elements of `box`, inside the part's."""
        return self.bits[slices(relative(box, self.box))]

    def stored(self, box: Box, info: ArrayInfo) -> np.ndarray:
        """The same as stored: a view on the CPU, else a copy."""
        where: Any = (*slices(relative(box, self.box)), ...)  # the dots: a view even of an array without dims
        return self.array[where] if self.array is not None else _stored(self.cut(box), info)


def held_parts(arrays: Arrays, parts: Parts) -> dict[str, list[Held]]:
    """Of every part. Raises ValueError: one that is not of its array's dtype or not of its box's shape."""
    found: dict[str, list[Held]] = {}
    for key, of_key in parts.items():
        info, found[key] = arrays[key], []
        for part in of_key:
            dtype = str(part.data.dtype).removeprefix("torch.")
            if dtype != info.dtype or tuple(part.data.shape) != extent(part.box):
                raise ValueError(
                    f"the part {part.box} of {key} is {dtype} {tuple(part.data.shape)}; its array and box say "
                    f"{info.dtype} {extent(part.box)}"
                )
            bits = part.data.detach().view(BITS[part.data.element_size()])
            found[key].append(Held(part.box, bits, _stored(bits, info) if bits.device.type == "cpu" else None))
    return found


def _stored(bits: Tensor, info: ArrayInfo) -> np.ndarray:
    return bits.cpu().numpy().view(STORED[info.dtype][0])


def _local(key: str, info: ArrayInfo, parts: Sequence[Held], cell: Box) -> np.ndarray:
    for part in parts:
        if intersect(part.box, cell) == cell:
            return part.stored(cell, info)
    whole, missing = _assembled(info, parts, cell)
    if missing:
        raise _lacking(key, cell, missing)
    return whole


def _assembled(info: ArrayInfo, parts: Sequence[Held], cell: Box) -> tuple[np.ndarray, int]:
    """A cell with what is here of it, and how many elements are not: those are not initialized."""
    whole, missing = np.empty(extent(cell), STORED[info.dtype][0]), volume(cell)
    for part in parts:
        if (box := intersect(part.box, cell)) is not None:
            whole[slices(relative(box, cell))] = part.stored(box, info)
            missing -= volume(box)
    return whole, missing


def _lacking(key: str, cell: Box, missing: int) -> ValueError:
    return ValueError(
        f"{key}: {missing} of the {volume(cell)} elements of {cell} are in no part; pass the parts whose boxes the "
        "plan was made from"
    )


def exchange(
    wave: list[Fragment],
    arrays: Arrays,
    parts: Mapping[str, Sequence[Held]],
    rank: int,
    group: Group | None,
    device: torch.device | str,
) -> Iterator[tuple[Fragment, Tensor]]:
    """One all-to-all: (fragment, its bits on the CPU) of what came to `rank`. wave: sorted, what concerns `rank`."""
    if group is None:
        raise ValueError(f"the plan moves {len(wave)} fragments between ranks; pass the group of all of them")
    going: list[list[Fragment]] = [[] for _ in range(group.size)]
    coming: list[list[Fragment]] = [[] for _ in range(group.size)]
    for fragment in wave:
        if fragment.source == rank:
            going[fragment.destination].append(fragment)
        if fragment.destination == rank:
            coming[fragment.source].append(fragment)
    send, receive = ([sum(_size(f, arrays) for f in peer) for peer in side] for side in (going, coming))
    message = _packed(going, sum(send), arrays, parts, device)
    answer = all_to_all(message, group, send_rows=send, receive_rows=receive).cpu()
    del message  # not held while the caller writes
    yield from _split(answer, coming, arrays)


def _packed(
    going: list[list[Fragment]],
    size: int,
    arrays: Arrays,
    parts: Mapping[str, Sequence[Held]],
    device: torch.device | str,
) -> Tensor:
    message = torch.empty(size, dtype=torch.uint8, device=device)
    for fragment, raw in _split(message, going, arrays):
        part = next(part for part in parts[fragment.key] if intersect(part.box, fragment.box) == fragment.box)
        raw.copy_(part.cut(fragment.box))
    return message


def _size(fragment: Fragment, arrays: Arrays) -> int:
    return wire_bytes(fragment.box, arrays[fragment.key])


def _split(message: Tensor, order: list[list[Fragment]], arrays: Arrays) -> Iterator[tuple[Fragment, Tensor]]:
    """Each fragment with its place in a message, as integers of its dtype's size."""
    start = 0
    for fragment in (fragment for peer in order for fragment in peer):
        itemsize = arrays[fragment.key].itemsize
        raw = message[start : start + volume(fragment.box) * itemsize]
        yield fragment, raw.view(BITS[itemsize]).view(extent(fragment.box))
        start += _size(fragment, arrays)
