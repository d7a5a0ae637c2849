"""A cell's checksum, against files built by hand from the words of docs/concepts/checkpoint.md."""

import struct
import zlib

import google_crc32c
import numpy as np
import pytest

from core.dist_checkpointing.format.digest import cell_crc, file_crc, json_crc
from tests.dist_checkpointing.places import Folder, cell_files, described, flipped, random_array, write

MISSING = struct.pack("<QQ", 2**64 - 1, 2**64 - 1)
PLAIN = described(np.zeros((5, 6), "float32"), (4, 6))
SHARD = described(np.zeros((10, 6), "float32"), (8, 6), (2, 6))


def sealed(data):
    return data + struct.pack("<I", google_crc32c.value(data))


def shard(pieces):
    """A shard with these pieces, None for those outside of the array, and what its checksum is about."""
    body, index, beside = b"", b"", b""
    for piece in pieces:
        if piece is None:
            index += MISSING
        else:
            data = sealed(piece)
            index += struct.pack("<QQ", len(body), len(data))
            body, beside = body + data, beside + data[-4:]
    return body + sealed(index), beside + sealed(index)


def crc_of(data, metadata):
    return cell_crc(lambda offset, length: data[offset : offset + length], len(data), metadata)


def random_bytes(n):
    return np.random.default_rng(n).bytes(n)


def test_json():
    assert json_crc(b"{}") == zlib.crc32(b"{}")


def test_a_plain_cell():
    data = sealed(random_bytes(96))
    assert crc_of(data, PLAIN) == zlib.crc32(data[-4:])


@pytest.mark.parametrize("present", [4, 3, 1])
def test_a_shard(present, tmp_path):
    data, beside = shard([random_bytes(48 + i)[:48] for i in range(present)] + [None] * (4 - present))
    assert crc_of(data, SHARD) == zlib.crc32(beside)
    (tmp_path / "c.0").write_bytes(data)
    assert file_crc(tmp_path / "c.0", SHARD) == (len(data), zlib.crc32(beside))


def test_reads_few_bytes():
    """Two reads per shard and 4 bytes per piece: what makes the check of a whole checkpoint cheap."""
    asked = []
    data, _ = shard([random_bytes(48)] * 4)

    def read(offset, length):
        asked.append(length)
        return data[offset : offset + length]

    cell_crc(read, len(data), SHARD)
    assert asked == [4 * 16 + 4, 4, 4, 4, 4]


@pytest.mark.parametrize(("cell", "inner"), [((4, 6), None), ((8, 6), (2, 6))])
def test_what_tensorstore_writes(cell, inner, tmp_path):
    """Byte for byte the file of the words: pieces in C order, outside of the array NaN or nothing."""
    array = random_array((11, 6), "float32")
    metadata = described(array, cell, inner)
    write(Folder(tmp_path), {"x": array}, {"x": metadata})
    rows, step = cell[0], (inner or cell)[0]
    padded = np.full((16, 6), np.nan, "float32")
    padded[:11] = array
    for number, path in enumerate(cell_files(tmp_path, "x", metadata)):
        starts = range(number * rows, (number + 1) * rows, step)
        parts = [padded[start : start + step].tobytes() if start < 11 else None for start in starts]
        expected, beside = shard(parts) if inner else (sealed(parts[0]), sealed(parts[0])[-4:])
        assert path.read_bytes() == expected
        assert file_crc(path, metadata) == (len(expected), zlib.crc32(beside))


def test_every_byte_beside_the_payload_counts():
    data, beside = shard([random_bytes(48)] * 3 + [None])
    whole = crc_of(data, SHARD)
    changes = 0
    for at in range(len(data)):
        damaged = flipped(data, at)
        try:
            changes += crc_of(damaged, SHARD) != whole
        except ValueError:
            changes += 1
    assert changes == len(beside)


def test_every_other_size_is_refused():
    plain, (sharded, _) = sealed(random_bytes(96)), shard([random_bytes(48)] * 3 + [None])
    for data, metadata in ((plain, PLAIN), (sharded, SHARD)):
        for size in [*range(len(data)), len(data) + 1, len(data) + 52]:
            with pytest.raises(ValueError):
                crc_of((data * 2)[:size], metadata)


@pytest.mark.parametrize(
    "entries",
    [
        [(0, 52), (52, 52), (52, 52), (156, 52)],  # one piece twice
        [(0, 52), (53, 52), (104, 52), (156, 52)],
        [(0, 52), (52, 48), (104, 52), (156, 52)],
        [(0, 52), (52, 52), (104, 52), (2**64 - 1, 52)],
        [(0, 52), (52, 52), (104, 52), (2**63, 52)],
        [(0, 52), (52, 52), (2**64 - 1, 2**64 - 1), (156, 52)],
        [(2**64 - 1, 2**64 - 1)] * 4,
    ],
)
def test_an_index_that_points_elsewhere(entries):
    index = sealed(b"".join(struct.pack("<QQ", *entry) for entry in entries))
    count = sum(entry != (2**64 - 1, 2**64 - 1) for entry in entries)
    with pytest.raises(ValueError, match="index"):
        crc_of(bytes(52 * count) + index, SHARD)


def test_a_file_that_shrinks_meanwhile_is_named(tmp_path):
    data = sealed(random_bytes(96))
    with pytest.raises(ValueError, match="0 bytes at 96 instead of 4"):
        cell_crc(lambda offset, length: b"", len(data), PLAIN)
    (tmp_path / "c.0").write_bytes(data[:50])
    with pytest.raises(ValueError, match=r"c\.0: 50 bytes instead of 100"):
        file_crc(tmp_path / "c.0", PLAIN)
