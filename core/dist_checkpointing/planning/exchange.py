"""Carries out a plan: ranks send each other what they lack of their cells, as bits, in waves of all-to-alls."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from core.dist_checkpointing.format.arrays import STORED_DTYPES, ArrayInfo, Arrays, Index
from core.dist_checkpointing.planning.plan import Transfer, WritePlan, transfer_bytes
from core.parallel_state.collectives import Group, all_gather, all_to_all
from core.parallel_state.collectives.failure import Unanswered
from core.parallel_state.collectives.staged import to_host
from core.parallel_state.environment import reading_waits
from core.parallel_state.flat import Box, extent, intersect, relative, slices, volume

# item size -> dtype that elements travel as: integers, because copying a NaN as a float may change its payload
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BITS[16] = torch.complex128  # there is no wider integer


class ShardLike(Protocol):
    """A box of an array in this rank's memory."""

    @property
    def box(self) -> Box:
        """Where it lies in the array."""
        ...

    @property
    def data(self) -> Tensor:
        """The elements: exactly the box's extent, with any strides, on any device."""
        ...


ShardsByKey = Mapping[str, Sequence[ShardLike]]
OwnedCell = tuple[str, Index, Box, np.ndarray]
Cells = Iterable[OwnedCell]


def owned_cells(
    plan: WritePlan,
    arrays: Arrays,
    shards: ShardsByKey,
    rank: int,
    group: Group | None,
    device: torch.device | str = "cpu",
) -> Iterator[OwnedCell]:
    """Collective: every rank exhausts it, or the others hang. Each cell that `rank` owns, once, as stored.

    Cells that need nothing from other ranks come first, then wave by wave those that became complete.
    """
    yield from local_cells(plan, arrays, shards, rank)
    yield from exchanged_cells(plan, arrays, shards, rank, group, device)


def local_cells(
    plan: WritePlan, arrays: Arrays, shards: ShardsByKey, rank: int
) -> Iterator[OwnedCell]:
    """The cells that `rank` owns and holds: views (any strides) of a shard on the CPU that covers the cell.

    Raises ValueError: a shard that is not of its array's dtype or not of its box's shape, shards that are not what
    the plan was made from.
    """
    return (cell.owned() for cell in held_cells(plan, arrays, shards, rank))


def held_cells(
    plan: WritePlan, arrays: Arrays, shards: ShardsByKey, rank: int
) -> Iterator["LocalCell"]:
    """`local_cells` before anything is copied. Raises ValueError: as that, for a shard."""
    local_shards = shards_as_bits(arrays, shards)
    # cells that others send something of are left to `exchanged_cells`
    awaited = set()
    for wave in plan.waves:
        for transfer in wave:
            if transfer.destination == rank:
                awaited.add((transfer.key, transfer.cell))
    for key, index, box in plan.owned(rank):
        if (key, index) not in awaited:
            yield LocalCell(key, index, box, arrays[key], local_shards.get(key, ()))


def exchanged_cells(
    plan: WritePlan,
    arrays: Arrays,
    shards: ShardsByKey,
    rank: int,
    group: Group | None,
    device: torch.device | str = "cpu",
) -> Iterator[OwnedCell]:
    """Collective: every rank exhausts it. The cells that `rank` assembles from what others send, in new memory.

    group: of all ranks of the plan, None for a single process. device: where the group's messages live.
    Raises ValueError: as `local_cells`.
    """
    local_shards = shards_as_bits(arrays, shards)
    boxes = {(key, index): box for key, index, box in plan.owned(rank)}
    incomplete: dict[tuple[str, Index], np.ndarray] = {}
    # elements that are still to come
    missing: dict[tuple[str, Index], int] = {}
    for wave in plan.waves:
        for transfer, elements in exchange(wave, arrays, local_shards, rank, group, device):
            key = transfer.key
            index = transfer.cell
            cell = key, index
            if cell not in incomplete:
                incomplete[cell], missing[cell] = _assemble(
                    arrays[key], local_shards.get(key, ()), boxes[cell]
                )
            inside = slices(relative(transfer.box, boxes[cell]))
            incomplete[cell][inside] = _as_stored(elements, arrays[key])
            missing[cell] -= volume(transfer.box)
            if not missing[cell]:
                # handed out at once and dropped here: memory holds one incomplete cell per rank, not all of them
                yield key, index, boxes[cell], incomplete.pop(cell)
    for key, index in incomplete:
        raise _incomplete_error(key, boxes[key, index], missing[key, index])


def gather_json(value: Any, group: Group | None, device: torch.device | str = "cpu") -> list[Any]:
    """Collective: one JSON value of every rank, in rank order, as it reads back.

    device: of the group's messages, where gloo does not carry those of the host.
    Raises Unanswered: a rank did not come, as in a save by one rank alone.
    """
    if group is None:
        return [json.loads(json.dumps(value))]
    try:
        return _gather_json(value, group, device)
    except Unanswered as error:
        raise Unanswered(
            f"{error}. A checkpoint is saved and loaded by all ranks together, each with its part: call save and "
            "load on every rank, not inside `if rank == 0:`",
            error.ranks,
        ) from error


def _gather_json(value: Any, group: Group, device: torch.device | str) -> list[Any]:
    # from host to host: nothing waits for what a device was asked for
    if "cpu" in group.gloo:
        device = "cpu"
    text = json.dumps(value).encode()
    # all-gather needs equal sizes: the lengths go first, then every text padded to the longest (JSON ignores spaces)
    sizes = all_gather(torch.tensor([len(text)], device=device), group).tolist()
    padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8).to(device)
    texts = all_gather(padded, group).cpu().numpy().reshape(len(sizes), -1)
    return [json.loads(row.tobytes()) for row in texts]


@dataclass(frozen=True)
class ShardBits:
    """A shard as integers of its dtype's size; array: the same memory as it is stored, None on an accelerator.

    Made once per shard: a view by torch costs more than writing a small cell.
    """

    box: Box
    bits: Tensor
    array: np.ndarray | None

    def cut(self, box: Box) -> Tensor:
        """The elements of `box`, which lies inside of the shard's."""
        return self.bits[slices(relative(box, self.box))]

    def stored(self, box: Box, info: ArrayInfo) -> np.ndarray:
        """The elements of `box` in the stored dtype: a view on the CPU, else a copy."""
        if self.array is None:
            return _as_stored(self.cut(box), info)
        # the dots: a view even of an array without dims
        index: Any = (*slices(relative(box, self.box)), ...)
        return self.array[index]


@dataclass(frozen=True)
class LocalCell:
    """A cell that this rank holds, in one of `shards` or in several together."""

    key: str
    index: Index
    box: Box
    info: ArrayInfo
    shards: Sequence[ShardBits]

    @property
    def on_device(self) -> bool:
        """Whether one of the shards is an accelerator's."""
        return any(shard.array is None for shard in self.shards)

    def owned(self) -> OwnedCell:
        """As `local_cells` yields it: a view of the shard that covers it, else assembled in new memory."""
        return (
            self.key,
            self.index,
            self.box,
            _local_cell(self.key, self.info, self.shards, self.box),
        )

    def pieces(self) -> list[ShardBits]:
        """All that makes up the cell, cut to it: one piece where one shard covers it."""
        pieces = []
        for shard in self.shards:
            box = intersect(shard.box, self.box)
            if box is None:
                continue
            piece = replace(shard, box=box, bits=shard.cut(box))
            if box == self.box:
                # it covers the cell by itself
                return [piece]
            pieces.append(piece)
        return pieces

    def on_host(self, pieces: Iterable[tuple[Box, Tensor]]) -> "LocalCell":
        """The same cell, of copies of its pieces' bits in host memory."""
        copies = [ShardBits(box, bits, _as_stored(bits, self.info)) for box, bits in pieces]
        return replace(self, shards=copies)


def shards_as_bits(arrays: Arrays, shards: ShardsByKey) -> dict[str, list[ShardBits]]:
    """Every shard as bits. Raises ValueError: one that is not of its array's dtype or not of its box's shape."""
    bits_by_key: dict[str, list[ShardBits]] = {}
    for key, shards_of_array in shards.items():
        info = arrays[key]
        bits_by_key[key] = []
        for shard in shards_of_array:
            dtype = str(shard.data.dtype).removeprefix("torch.")
            shape = tuple(shard.data.shape)
            if dtype != info.dtype or shape != extent(shard.box):
                raise ValueError(
                    f"the part {shard.box} of {key} is {dtype} {shape}; its array and box say "
                    f"{info.dtype} {extent(shard.box)}"
                )
            bits = shard.data.detach().view(BITS[shard.data.element_size()])
            if reading_waits(bits.device):
                array = None
            else:
                array = _as_stored(bits, info)
            bits_by_key[key].append(ShardBits(shard.box, bits, array))
    return bits_by_key


def _as_stored(bits: Tensor, array_info: ArrayInfo) -> np.ndarray:
    stored_dtype, _ = STORED_DTYPES[array_info.dtype]
    # through pinned memory: copies to pageable memory run at a tenth of the bus
    host = bits if bits.device.type == "cpu" else to_host(bits)
    return host.numpy().view(stored_dtype)


def _local_cell(
    key: str, array_info: ArrayInfo, shards: Sequence[ShardBits], cell: Box
) -> np.ndarray:
    """A cell that this rank holds: a view of the shard that covers it, else assembled in new memory."""
    # the common case without ZeRO: one shard covers the cell, and nothing is copied
    for shard in shards:
        if intersect(shard.box, cell) == cell:
            return shard.stored(cell, array_info)
    array, missing = _assemble(array_info, shards, cell)
    if missing:
        raise _incomplete_error(key, cell, missing)
    return array


def _assemble(
    array_info: ArrayInfo, shards: Sequence[ShardBits], cell: Box
) -> tuple[np.ndarray, int]:
    """A cell filled with what this rank holds of it, and how many elements it lacks: those are not initialized."""
    array = np.empty(extent(cell), STORED_DTYPES[array_info.dtype][0])
    missing = volume(cell)
    for shard in shards:
        if (overlap := intersect(shard.box, cell)) is not None:
            array[slices(relative(overlap, cell))] = shard.stored(overlap, array_info)
            missing -= volume(overlap)
    return array, missing


def _incomplete_error(key: str, cell: Box, missing: int) -> ValueError:
    return ValueError(
        f"{key}: {missing} of the {volume(cell)} elements of {cell} are in no part; pass the parts whose boxes the "
        "plan was made from"
    )


def exchange(
    wave: list[Transfer],
    arrays: Arrays,
    shards: Mapping[str, Sequence[ShardBits]],
    rank: int,
    group: Group | None,
    device: torch.device | str,
) -> Iterator[tuple[Transfer, Tensor]]:
    """Collective: one all-to-all. (transfer, its bits on the CPU) of all that came to `rank`.

    wave: sorted transfers, at least all that `rank` sends or receives. device: where the group's messages live.
    Raises ValueError: transfers without a group to send them in.
    """
    if group is None:
        raise ValueError(
            f"the plan moves {len(wave)} transfers between ranks; pass the group of all of them"
        )
    outgoing: list[list[Transfer]] = [[] for _ in range(group.size)]
    incoming: list[list[Transfer]] = [[] for _ in range(group.size)]
    for transfer in wave:
        if transfer.source == rank:
            outgoing[transfer.destination].append(transfer)
        if transfer.destination == rank:
            incoming[transfer.source].append(transfer)
    # both sides know the sizes from the plan: nothing has to be exchanged before the elements
    send_bytes = [_message_bytes(transfers, arrays) for transfers in outgoing]
    receive_bytes = [_message_bytes(transfers, arrays) for transfers in incoming]
    message = _packed(outgoing, sum(send_bytes), arrays, shards, device)
    received = all_to_all(message, group, send_rows=send_bytes, receive_rows=receive_bytes)
    if received.device.type != "cpu":
        # into pinned memory: ten times as fast
        received = to_host(received)
    del message  # its memory is free while the caller writes
    yield from _unpacked(received, incoming, arrays)


def _packed(
    outgoing: list[list[Transfer]],
    size: int,
    arrays: Arrays,
    shards: Mapping[str, Sequence[ShardBits]],
    device: torch.device | str,
) -> Tensor:
    """The message of `size` bytes with all that this rank sends, one destination after the other."""
    message = torch.empty(size, dtype=torch.uint8, device=device)
    for transfer, elements in _unpacked(message, outgoing, arrays):
        # a transfer was cut from one shard of its source, so one of them covers it
        candidates = shards[transfer.key]
        source = next(
            shard for shard in candidates if intersect(shard.box, transfer.box) == transfer.box
        )
        elements.copy_(source.cut(transfer.box))
    return message


def _message_bytes(transfers: list[Transfer], arrays: Arrays) -> int:
    return sum(transfer_bytes(transfer.box, arrays[transfer.key]) for transfer in transfers)


def _unpacked(
    message: Tensor, transfers_by_rank: list[list[Transfer]], arrays: Arrays
) -> Iterator[tuple[Transfer, Tensor]]:
    """Each transfer with the view of its elements in a message, as integers of its dtype's size."""
    start = 0
    for transfers in transfers_by_rank:
        for transfer in transfers:
            info = arrays[transfer.key]
            elements = message[start : start + volume(transfer.box) * info.itemsize]
            yield transfer, elements.view(BITS[info.itemsize]).view(extent(transfer.box))
            start += transfer_bytes(transfer.box, info)
