"""The checksum of a file of the checkpoint, from the few bytes that determine the others (docs: the manifest)."""

import os
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from core.dist_checkpointing.format.zarr_metadata import Chunks
from core.dist_checkpointing.storage.fs import open_regular

_CRC_BYTES = 4
_MISSING = (2**64 - 1, 2**64 - 1)  # the index entry of a piece that lies outside of the array


def json_crc(data: bytes) -> int:
    """Of a JSON file: of all its bytes."""
    return zlib.crc32(data)


def cell_crc(read: Callable[[int, int], bytes], size: int, metadata: Mapping[str, Any]) -> int:
    """Of a cell: of everything in it beside the payload, in file order. `read(offset, length)` reads the file.

    Raises ValueError: a file that cannot be a cell of this array, by its size or by its index.
    """
    chunks = Chunks.of(metadata)
    stride = chunks.unit_bytes + _CRC_BYTES
    if chunks.piece is None:
        if size != stride:
            raise ValueError(f"{size} bytes instead of {stride}")
        return zlib.crc32(_exactly(read, chunks.unit_bytes, _CRC_BYTES))
    length = 16 * chunks.pieces + _CRC_BYTES
    if size < length:
        raise ValueError(f"{size} bytes, the index alone has {length}")
    index = _exactly(read, size - length, length)
    starts = _starts(index, chunks.pieces, stride)
    if size != len(starts) * stride + length:
        raise ValueError(f"{size} bytes instead of {len(starts)} * {stride} + {length}")
    crcs = [_exactly(read, start + chunks.unit_bytes, _CRC_BYTES) for start in starts]
    return zlib.crc32(b"".join([*crcs, index]))


def file_crc(path: str | os.PathLike[str], metadata: Mapping[str, Any]) -> tuple[int, int]:
    """(size, `cell_crc`) of a local file."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        return size, cell_crc(lambda offset, length: os.pread(descriptor, length, offset), size, metadata)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None
    finally:
        os.close(descriptor)


def _starts(index: bytes, pieces: int, stride: int) -> range:
    """Where the pieces of a shard begin: one behind the other from 0, in whatever order, or ValueError."""
    numbers = struct.unpack_from(f"<{2 * pieces}Q", index)
    entries = [entry for entry in zip(numbers[::2], numbers[1::2], strict=True) if entry != _MISSING]
    starts = range(0, len(entries) * stride, stride)
    if not entries or sorted(entries) != [(start, stride) for start in starts]:
        raise ValueError(f"the index does not list pieces of {stride} bytes one behind the other")
    return starts


def _exactly(read: Callable[[int, int], bytes], offset: int, length: int) -> bytes:
    data = read(offset, length)
    if len(data) != length:
        raise ValueError(f"{len(data)} bytes at {offset} instead of {length}")
    return data
