"""The values of a directory of torch's DCP, one `torch.save` at a time, by `torch.load(weights_only=True)`."""

import io
import os
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from core.dist_checkpointing.state.tensors import unstorable
from core.dist_checkpointing.storage.fs import open_regular
from core.dist_checkpointing.tools.foreign.dcp import ByteRange, SavedTensor
from core.parallel_state.flat import Box, extent, intersect, relative, slices

# of shards that stay for the next cells: one shard may be a part of many cells
CACHE_BYTES = 1 << 30


def load_saved(byte_range: ByteRange) -> Any:
    """What `torch.save` wrote there. Raises ValueError: damage, or a type that weights_only=True does not read."""
    try:
        with _open_range(byte_range) as file:
            check_archive(file, byte_range.length)
            file.seek(0)
            value = torch.load(file, map_location="cpu", weights_only=True)
            for name in byte_range.within:
                value = _item(value, name)
            return value
    except OSError:
        raise
    except Exception as error:
        # a damaged archive may raise anything; of torch's long message the line that names the type, else the first
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next((line for line in lines if "nsupported" in line), "".join(lines[:1]))
        end = byte_range.offset + byte_range.length
        raise ValueError(
            f"bytes {byte_range.offset} to {end} of {byte_range.file}: {reason}"
        ) from None


def _load_raw(byte_range: ByteRange, box: Box) -> Tensor:
    """The values that lie there. Raises ValueError: the file ends before."""
    with _open_range(byte_range) as file:
        values = bytearray(file.read(byte_range.length))
    dtype = getattr(torch, str(byte_range.raw))
    return torch.frombuffer(values, dtype=dtype).view(extent(box))


@contextmanager
def _open_range(byte_range: ByteRange) -> Iterator[io.BufferedReader]:
    descriptor = open_regular(byte_range.file)
    with open(descriptor, "rb", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        if size < byte_range.offset + byte_range.length:
            raise ValueError(f"the file ends at {size}")
        yield io.BufferedReader(_FileRange(file, byte_range.offset, byte_range.length))


class _FileRange(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        # zipfile looks for the archive's directory from the end: that of the range, not of the file
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}
        self._position = offset + origins[whence]
        return self._position

    def readinto(self, into: Any) -> int:
        count = max(0, min(len(into), self._length - self._position))
        self._file.seek(self._start + self._position)
        read_bytes = self._file.readinto(memoryview(into)[:count]) or 0
        self._position += read_bytes
        return read_bytes


def check_archive(file: io.BufferedReader, length: int) -> None:
    """Raises ValueError: no archive of torch.save, one that would be larger in memory than it is here, damage.

    torch itself does not look for damage.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed, which torch.save does not do")
        size = sum(entry.file_size for entry in entries)
        if size > length:
            raise ValueError(f"it says to hold {size} bytes")
        damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(
                f"{damaged} is damaged by its CRC-32 (or set_crc32_options(False) was set when it was saved)"
            )


def _item(value: Any, name: str) -> Any:
    if isinstance(value, (list, tuple)):
        return value[int(name)]
    return next(item for key, item in value.items() if str(key) == name)


class ShardCache:
    """Loads shards of tensors; the last ones stay in memory, up to `CACHE_BYTES` beside the one in use."""

    def __init__(self) -> None:
        self._shards: OrderedDict[ByteRange, Tensor] = OrderedDict()

    def fill(self, key: str, tensor: SavedTensor, box: Box) -> Tensor:
        """The values of a box, in new memory. Raises ValueError: damage, or an element that no shard holds."""
        values = torch.empty(extent(box), dtype=getattr(torch, tensor.dtype))
        filled = torch.zeros(extent(box), dtype=torch.bool)
        for shard_box, byte_range in tensor.shards:
            overlap = intersect(shard_box, box)
            if overlap is None:
                continue
            inside = slices(relative(overlap, box))
            if bool(filled[inside].any()):
                raise ValueError(f"{key}: two pieces hold {overlap}; the directory is damaged")
            # two shards with the same element: nobody knows which one is right
            filled[inside] = True
            shard = self._load(key, tensor, shard_box, byte_range)
            values[inside] = shard[slices(relative(overlap, shard_box))]
        if not bool(filled.all()):
            raise ValueError(f"{key}: no piece holds a part of {box}; the directory is damaged")
        return values

    def _load(self, key: str, tensor: SavedTensor, box: Box, byte_range: ByteRange) -> Tensor:
        if byte_range in self._shards:
            self._shards.move_to_end(byte_range)
            return self._shards[byte_range]
        # least recently used first, before the next one is allocated
        while self._shards and self._cached_bytes() > CACHE_BYTES - byte_range.length:
            self._shards.popitem(last=False)
        if byte_range.raw is not None:
            shard = _load_raw(byte_range, box)
        else:
            shard = load_saved(byte_range)
        expected = byte_range.shape or extent(box)
        storable = isinstance(shard, Tensor) and not unstorable(shard)
        if (
            not storable
            or str(shard.dtype) != f"torch.{tensor.dtype}"
            or tuple(shard.shape) != expected
        ):
            actual = type(shard).__name__
            if isinstance(shard, Tensor):
                actual = f"{shard.dtype} of {tuple(shard.shape)}"
            raise ValueError(
                f"{key}: {byte_range.file} holds {actual} where {tensor.dtype} of {expected} should be"
            )
        shard = shard.reshape(extent(box))
        self._shards[byte_range] = shard
        return shard

    def _cached_bytes(self) -> int:
        return sum(shard.untyped_storage().nbytes() for shard in self._shards.values())
