"""The checksum of a file of the checkpoint, from the few bytes that determine the others (docs: the manifest).

A cell carries a crc32c behind every payload, so a checksum over those checksums vouches for gigabytes without
reading them.
"""

import os
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from core.dist_checkpointing.format.zarr_metadata import CRC_BYTES, Chunking
from core.dist_checkpointing.storage.fs import open_regular

# the index entry of an inner chunk that lies outside of the array
_OUTSIDE = (2**64 - 1, 2**64 - 1)


def json_crc(data: bytes) -> int:
    """Of a JSON file: of all its bytes."""
    return zlib.crc32(data)


def cell_crc(read: Callable[[int, int], bytes], size: int, metadata: Mapping[str, Any]) -> int:
    """Of a cell: of everything in it beside the payload, in file order. `read(offset, length)` reads the file.

    Raises ValueError: a file that cannot be a cell of this array, by its size or by its index.
    """
    chunking = Chunking.from_metadata(metadata)
    stride = chunking.unit_bytes + CRC_BYTES
    if chunking.inner is None:
        if size != stride:
            raise ValueError(f"{size} bytes instead of {stride}")
        return zlib.crc32(_read_exactly(read, chunking.unit_bytes, CRC_BYTES))
    length = chunking.index_bytes
    if size < length:
        raise ValueError(f"{size} bytes, the index alone has {length}")
    index = _read_exactly(read, size - length, length)
    # writers may order the chunks as they like: the index says where each is
    offsets = _chunk_offsets(index, chunking.units_per_cell, stride)
    if size != len(offsets) * stride + length:
        raise ValueError(f"{size} bytes instead of {len(offsets)} * {stride} + {length}")
    crcs = [_read_exactly(read, offset + chunking.unit_bytes, CRC_BYTES) for offset in offsets]
    return zlib.crc32(b"".join([*crcs, index]))


def file_crc(path: str | os.PathLike[str], metadata: Mapping[str, Any]) -> tuple[int, int]:
    """(size, `cell_crc`) of a local file."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        return size, cell_crc(
            lambda offset, length: os.pread(descriptor, length, offset), size, metadata
        )
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None
    finally:
        os.close(descriptor)


def _chunk_offsets(index: bytes, units: int, stride: int) -> range:
    """Where the inner chunks of a cell begin: one behind the other from 0, in whatever order, or ValueError."""
    numbers = struct.unpack_from(f"<{2 * units}Q", index)
    entries = [
        entry for entry in zip(numbers[::2], numbers[1::2], strict=True) if entry != _OUTSIDE
    ]
    offsets = range(0, len(entries) * stride, stride)
    if not entries or sorted(entries) != [(offset, stride) for offset in offsets]:
        raise ValueError(f"the index does not list pieces of {stride} bytes one behind the other")
    return offsets


def _read_exactly(read: Callable[[int, int], bytes], offset: int, length: int) -> bytes:
    data = read(offset, length)
    if len(data) != length:
        raise ValueError(f"{len(data)} bytes at {offset} instead of {length}")
    return data
