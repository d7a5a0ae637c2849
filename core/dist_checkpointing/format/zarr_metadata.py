"""What the zarr.json files of a checkpoint say, and nothing else is believed when they are read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from core.dist_checkpointing.format.arrays import ITEMSIZE, STORED, ArrayInfo

Json = dict[str, Any]

_BYTES: Json = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: Json = {"name": "crc32c"}
_NEWER = "a newer version may have written it, or another program"

# Far above any checkpoint, low enough that what a hostile file says costs neither memory nor time.
_MAX_DIMS, _MAX_CELLS, _MAX_PIECES, _MAX_CHUNK_BYTES = 32, 2**24, 2**16, 2**30


@dataclass(frozen=True)
class Chunks:
    """How an array is cut: in cells, one file each, and those in pieces (None: the cell is one)."""

    shape: tuple[int, ...]
    data_type: str
    cell: tuple[int, ...]
    piece: tuple[int, ...] | None

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Chunks":
        """What an array's metadata says; `check_metadata` tells whether it can be."""
        codec = metadata["codecs"][0]
        piece = tuple(codec["configuration"]["chunk_shape"]) if codec["name"] == "sharding_indexed" else None
        cell = tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
        return cls(tuple(metadata["shape"]), metadata["data_type"], cell, piece)

    @property
    def unit(self) -> tuple[int, ...]:
        """The shape of what one checksum covers: it is read as a whole."""
        return self.cell if self.piece is None else self.piece

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.data_type]

    @property
    def unit_bytes(self) -> int:
        """The payload of one."""
        return prod(self.unit) * self.itemsize

    @property
    def pieces(self) -> int:
        """Entries of a shard's index."""
        return prod(self.cell) // prod(self.unit)

    @property
    def most_bytes(self) -> int:
        """Of a cell's file: all pieces, each with its checksum, and a shard's index with its own."""
        return self.pieces * (self.unit_bytes + 4) + (0 if self.piece is None else 16 * self.pieces + 4)


def array_metadata(
    info: ArrayInfo, cell: tuple[int, ...], inner: tuple[int, ...] | None, attributes: Json | None = None
) -> Json:
    """The zarr.json of an array in cells of this shape, each a shard of `inner` pieces if that is not None.

    What tools need to know of it beside zarr is in the attributes `tp_dim` and `stack`, see `info_of`.
    """
    data_type, fill_value = STORED[info.dtype]
    codecs = [_BYTES, _CRC32C]
    if inner is not None:
        shard = {"chunk_shape": list(inner), "codecs": codecs, "index_codecs": codecs, "index_location": "end"}
        codecs = [{"name": "sharding_indexed", "configuration": shard}]
    told: Json = {"torch_dtype": info.dtype} if data_type != info.dtype else {}
    told |= {"tp_dim": info.tp_dim} if info.tp_dim is not None else {}
    told |= {"stack": info.stack} if info.stacked else {}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(info.shape),
        "data_type": data_type,
        "fill_value": fill_value,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(cell)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": codecs,
        "attributes": {**(attributes or {}), **told},
    }


def info_of(metadata: Mapping[str, Any]) -> ArrayInfo:
    """What an array is, by a zarr.json that passed `check_metadata`."""
    attributes = metadata["attributes"]
    dtype, tp_dim = attributes.get("torch_dtype", metadata["data_type"]), attributes.get("tp_dim")
    stacked = "stack" in attributes
    ragged = not stacked and tp_dim == 0
    return ArrayInfo(tuple(metadata["shape"]), dtype, tp_dim, stacked, ragged, attributes.get("stack", ""))


def group_metadata(arrays: Mapping[str, Json], attributes: Json) -> dict[str, Json]:
    """The zarr.json of every group, by its path; the root's, "", consolidates all of them and the arrays.

    Raises ValueError: a key that cannot be a path, an array inside another.
    """
    groups: dict[str, Json] = {}
    for key in arrays:
        check_path(key)
        parts = key.split("/")
        for length in range(1, len(parts)):
            path = "/".join(parts[:length])
            if path in arrays:
                raise ValueError(f"the array {key!r} lies inside the array {path!r}: rename one of them")
            groups[path] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    # An empty table in a group within says to zarr-python: complete, do not look at the files.
    below = {path: {**group, "consolidated_metadata": _consolidated({})} for path, group in groups.items()}
    groups[""] = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": attributes,
        "consolidated_metadata": _consolidated({**below, **arrays}),
    }
    return groups


def _consolidated(entries: Json) -> Json:
    return {"kind": "inline", "must_understand": False, "metadata": entries}


def check_path(key: str) -> None:
    """Raises ValueError: what a file says is a path, and is none of plain names below a checkpoint."""
    for name in key.split("/"):
        plain = name.isprintable() and "\\" not in name and not name.startswith("__") and name != "zarr.json"
        if not plain or not name.strip("."):
            raise ValueError(f"array {_short(key)}: {_short(name)} cannot be a part of a key: use names between '/'")


def check_metadata(key: str, metadata: Any) -> None:
    """Raises ValueError: anything but what `array_metadata` makes for some array, of a size that can be."""
    check_path(key)
    try:
        chunks, attributes = Chunks.of(metadata), metadata["attributes"]
        dtype = attributes.get("torch_dtype", chunks.data_type)
        known = dtype in STORED
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"array {key!r}: zarr.json is not an array's ({error!r}); {_NEWER}") from None
    if not known:
        raise ValueError(f"array {key!r}: its type is {_short(dtype)}, known are {', '.join(STORED)}; {_NEWER}")
    expected = array_metadata(ArrayInfo(chunks.shape, dtype), chunks.cell, chunks.piece, attributes)
    if found := difference("zarr.json", metadata, expected):
        raise ValueError(f"array {key!r}: {found}; {_NEWER}")
    if problem := _absurd(chunks):
        raise ValueError(f"array {key!r}: {problem}; shape {_short(chunks.shape)}, cells {_short(chunks.cell)}")
    if problem := _misplaced(key, len(chunks.shape), attributes):
        raise ValueError(f"array {key!r}: {problem}; {_NEWER}")
    tp_dim = attributes.get("tp_dim")  # rows of a vocabulary are rounded up, which may be more than there are
    if any(cut > n and dim != tp_dim for dim, (n, cut) in enumerate(zip(chunks.shape, chunks.cell, strict=True))):
        raise ValueError(
            f"array {key!r}: cells {_short(chunks.cell)} are larger than its shape {_short(chunks.shape)}"
        )


def difference(where: str, found: Any, wanted: Any) -> str | None:
    """The first thing that is not as it should be; true is not 1, as it is to Python."""
    if json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True):
        return None
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        found, wanted = dict(enumerate(found)), dict(enumerate(wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted(found.keys() ^ wanted.keys()):
            return f"{where}: {_short(name)} is {'missing' if name in wanted else 'unknown'}"
        deeper = (difference(f"{where}: {name}", found[name], wanted[name]) for name in sorted(found))
        return next(filter(None, deeper))
    return f"{where} is {_short(found)}, this version reads {_short(wanted)}"


def _absurd(chunks: Chunks) -> str | None:
    """What of these numbers cannot be."""
    shape, cell, piece = chunks.shape, chunks.cell, chunks.unit
    if any(type(n) is not int or not 0 < n < 2**63 for n in (*shape, *cell, *piece)):
        return "its sizes are not integers from 1 to 2**63 - 1"
    if not len(shape) == len(cell) == len(piece) <= _MAX_DIMS:
        return f"{len(shape)} dims in cells of {len(cell)} in pieces of {len(piece)} (at most {_MAX_DIMS} dims)"
    if prod(shape) * ITEMSIZE[chunks.data_type] >= 2**63:
        return "it is larger than 2**63 bytes"
    if any(n % part for n, part in zip(cell, piece, strict=True)):
        return f"pieces {piece} do not divide its cells"
    cells = prod(-(-n // size) for n, size in zip(shape, cell, strict=True))
    if cells > _MAX_CELLS or chunks.pieces > _MAX_PIECES or chunks.unit_bytes > _MAX_CHUNK_BYTES:
        return f"{cells} cells of {chunks.pieces} pieces of {chunks.unit_bytes} bytes are too many or too large"
    return None


def _misplaced(key: str, dims: int, attributes: Json) -> str | None:
    """What `tp_dim` and `stack` cannot be."""
    tp_dim, stack = attributes.get("tp_dim", dims - 1), attributes.get("stack", "")
    stacked = "stack" in attributes
    if not isinstance(stack, str) or (stack and not key.rpartition("/")[2].startswith(f"{stack}.")):
        return f"the stack {_short(stack)} is not the beginning of its name"
    if stacked and not dims:
        return "it has no dim that counts the layers of its stack"
    if "tp_dim" in attributes and not (type(tp_dim) is int and stacked <= tp_dim < dims):
        return f"tp_dim is {_short(tp_dim)}, of {dims} dims{' of which the first counts layers' * stacked}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "…"
