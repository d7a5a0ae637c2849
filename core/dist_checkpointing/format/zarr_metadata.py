"""The zarr.json files of a checkpoint: how they are made, and the checks before one that is read is believed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from core.dist_checkpointing.format.arrays import ITEMSIZE, STORED_DTYPES, ArrayInfo

Json = dict[str, Any]

_BYTES: Json = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: Json = {"name": "crc32c"}
_NEWER = "a newer version may have written it, or another program"

# Far above any checkpoint, low enough that what a hostile file says costs neither memory nor time.
_MAX_DIMS = 32
_MAX_CELLS = 2**24
_MAX_INNER_CHUNKS = 2**16
_MAX_CHUNK_BYTES = 2**30

CRC_BYTES = 4  # of the checksum behind every payload
# offset and length of one inner chunk, two little-endian 64-bit integers
INDEX_ENTRY_BYTES = 16


@dataclass(frozen=True)
class Chunking:
    """How an array is cut: in cells, one file each, and those in inner chunks (None: the cell is one).

    A cell with inner chunks is what zarr calls a shard: the chunks, each with its checksum behind it, then an index
    of where each begins, then the index's checksum.
    """

    shape: tuple[int, ...]
    data_type: str
    cell: tuple[int, ...]
    inner: tuple[int, ...] | None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Chunking":
        """What an array's zarr.json says; `check_metadata` tells whether it can be."""
        codec = metadata["codecs"][0]
        inner = None
        if codec["name"] == "sharding_indexed":
            inner = tuple(codec["configuration"]["chunk_shape"])
        cell = tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
        return cls(tuple(metadata["shape"]), metadata["data_type"], cell, inner)

    @property
    def unit(self) -> tuple[int, ...]:
        """The shape of what one checksum covers: it is read as a whole."""
        if self.inner is None:
            return self.cell
        return self.inner

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.data_type]

    @property
    def unit_bytes(self) -> int:
        """The payload of one unit, without its checksum."""
        return prod(self.unit) * self.itemsize

    @property
    def units_per_cell(self) -> int:
        """How many units a cell has: the entries of its index."""
        return prod(self.cell) // prod(self.unit)

    @property
    def index_bytes(self) -> int:
        """The length of a cell's index and its checksum, at the end of the file; 0 without inner chunks."""
        if self.inner is None:
            return 0
        return INDEX_ENTRY_BYTES * self.units_per_cell + CRC_BYTES

    @property
    def max_file_bytes(self) -> int:
        """The size of a cell's file with all its units; one at the array's edge may have fewer."""
        return self.units_per_cell * (self.unit_bytes + CRC_BYTES) + self.index_bytes


def array_metadata(
    info: ArrayInfo,
    cell: tuple[int, ...],
    inner: tuple[int, ...] | None,
    attributes: Json | None = None,
) -> Json:
    """The zarr.json of an array in cells of this shape, each with chunks of shape `inner` if that is not None.

    What tools need to know of it beside zarr is in its attributes, see `info_of`: `tp_dim`, with `axis` where that is
    not tp; `stack`, with `layers` and `depth` where only some layers of the model have it.
    """
    data_type, fill_value = STORED_DTYPES[info.dtype]
    codecs = [_BYTES, _CRC32C]
    if inner is not None:
        sharding = {
            "chunk_shape": list(inner),
            "codecs": codecs,
            "index_codecs": codecs,
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    all_attributes = dict(attributes or {})
    if data_type != info.dtype:
        all_attributes["torch_dtype"] = info.dtype
    if info.tp_dim is not None:
        all_attributes["tp_dim"] = info.tp_dim
        if info.axis != "tp":
            all_attributes["axis"] = info.axis
    if info.stacked:
        all_attributes["stack"] = info.stack
        if info.layers:
            all_attributes["layers"], all_attributes["depth"] = list(info.layers), info.depth
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(info.shape),
        "data_type": data_type,
        "fill_value": fill_value,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(cell)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": codecs,
        "attributes": all_attributes,
    }


def info_of(metadata: Mapping[str, Any]) -> ArrayInfo:
    """What an array is, by a zarr.json that passed `check_metadata`."""
    attributes = metadata["attributes"]
    dtype = attributes.get("torch_dtype", metadata["data_type"])
    tp_dim = attributes.get("tp_dim")
    stacked = "stack" in attributes
    axis = attributes.get("axis", "tp")
    # rows cut over tp, outside of stacks: a vocabulary
    ragged = not stacked and tp_dim == 0 and axis == "tp"
    stack = attributes.get("stack", "")
    layers = tuple(attributes.get("layers", ()))
    depth = attributes.get("depth", 0)
    return ArrayInfo(
        tuple(metadata["shape"]), dtype, tp_dim, stacked, ragged, stack, layers, depth, axis
    )


def group_metadata(arrays: Mapping[str, Json], attributes: Json) -> dict[str, Json]:
    """The zarr.json of every group, by its path; the root's, "", consolidates all of them and the arrays.

    Raises ValueError: a key that cannot be a path, an array inside another.
    """
    groups: dict[str, Json] = {}
    for key in arrays:
        check_path(key)
        names = key.split("/")
        for length in range(1, len(names)):
            path = "/".join(names[:length])
            if path in arrays:
                raise ValueError(
                    f"the array {key!r} lies inside the array {path!r}: rename one of them"
                )
            groups[path] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    # An empty table in a group within says to zarr-python: complete, do not look at the files.
    subgroups = {
        path: {**group, "consolidated_metadata": _consolidated({})}
        for path, group in groups.items()
    }
    groups[""] = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": attributes,
        "consolidated_metadata": _consolidated({**subgroups, **arrays}),
    }
    return groups


def _consolidated(entries: Json) -> Json:
    return {"kind": "inline", "must_understand": False, "metadata": entries}


def check_path(key: str) -> None:
    """Raises ValueError: a key from a file that is not a path of plain names below a checkpoint."""
    for name in key.split("/"):
        plain = (
            name.isprintable()
            and "\\" not in name
            and not name.startswith("__")
            and name != "zarr.json"
        )
        if not plain or not name.strip("."):
            raise ValueError(
                f"array {_short_repr(key)}: {_short_repr(name)} cannot be a part of a key: use names between '/'"
            )


def check_metadata(key: str, metadata: Any) -> None:
    """Raises ValueError: anything but what `array_metadata` makes for some array, of a size that can be.

    It is made again from the few facts in it and compared, so that no field is overlooked.
    """
    check_path(key)
    try:
        chunking = Chunking.from_metadata(metadata)
        attributes = metadata["attributes"]
        dtype = attributes.get("torch_dtype", chunking.data_type)
        is_stored = dtype in STORED_DTYPES
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"array {key!r}: zarr.json is not an array's ({error!r}); {_NEWER}"
        ) from None
    if not is_stored:
        types = ", ".join(STORED_DTYPES)
        raise ValueError(
            f"array {key!r}: its type is {_short_repr(dtype)}, known are {types}; {_NEWER}"
        )
    # what a save writes for these facts, all fields of it
    expected = array_metadata(
        ArrayInfo(chunking.shape, dtype), chunking.cell, chunking.inner, attributes
    )
    if problem := difference("zarr.json", metadata, expected):
        raise ValueError(f"array {key!r}: {problem}; {_NEWER}")
    if problem := _impossible_sizes(chunking):
        raise ValueError(
            f"array {key!r}: {problem}; shape {_short_repr(chunking.shape)}, cells {_short_repr(chunking.cell)}"
        )
    if problem := _impossible_attributes(key, chunking.shape, attributes):
        raise ValueError(f"array {key!r}: {problem}; {_NEWER}")
    tp_dim = attributes.get("tp_dim")
    for dim, (size, cell_size) in enumerate(zip(chunking.shape, chunking.cell, strict=True)):
        # rows of a vocabulary are rounded up, which may be more than there are
        if cell_size > size and dim != tp_dim:
            raise ValueError(
                f"array {key!r}: cells {_short_repr(chunking.cell)} are larger than its shape "
                f"{_short_repr(chunking.shape)}"
            )


def difference(path: str, actual: Any, expected: Any) -> str | None:
    """The first difference between two JSON values, as a sentence; true is not 1, as it is to Python.

    path: of the values, for the sentence. None: they are equal.
    """
    if json.dumps(actual, sort_keys=True) == json.dumps(expected, sort_keys=True):
        return None
    if isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        actual = dict(enumerate(actual))
        expected = dict(enumerate(expected))
    if isinstance(actual, dict) and isinstance(expected, dict):
        for name in sorted(actual.keys() ^ expected.keys()):
            return f"{path}: {_short_repr(name)} is {'missing' if name in expected else 'unknown'}"
        for name in sorted(actual):
            if deeper := difference(f"{path}: {name}", actual[name], expected[name]):
                return deeper
        return None
    return f"{path} is {_short_repr(actual)}, this version reads {_short_repr(expected)}"


def _impossible_sizes(chunking: Chunking) -> str | None:
    """Why an array of these sizes cannot be; None if it can."""
    shape = chunking.shape
    cell = chunking.cell
    unit = chunking.unit
    # JSON's true is an int to isinstance
    if any(type(size) is not int or not 0 < size < 2**63 for size in (*shape, *cell, *unit)):
        return "its sizes are not integers from 1 to 2**63 - 1"
    if not len(shape) == len(cell) == len(unit) <= _MAX_DIMS:
        return f"{len(shape)} dims in cells of {len(cell)} in pieces of {len(unit)} (at most {_MAX_DIMS} dims)"
    if prod(shape) * ITEMSIZE[chunking.data_type] >= 2**63:
        return "it is larger than 2**63 bytes"
    if any(size % unit_size for size, unit_size in zip(cell, unit, strict=True)):
        return f"pieces {unit} do not divide its cells"
    cell_count = prod(-(-size // cell_size) for size, cell_size in zip(shape, cell, strict=True))
    units = chunking.units_per_cell
    unit_bytes = chunking.unit_bytes
    if cell_count > _MAX_CELLS or units > _MAX_INNER_CHUNKS or unit_bytes > _MAX_CHUNK_BYTES:
        return (
            f"{cell_count} cells of {units} pieces of {unit_bytes} bytes are too many or too large"
        )
    return None


def _impossible_attributes(key: str, shape: tuple[int, ...], attributes: Json) -> str | None:
    """Why what tools know of an array cannot be of this one; None if it can."""
    dims = len(shape)
    tp_dim = attributes.get("tp_dim", dims - 1)
    stack = attributes.get("stack", "")
    stacked = "stack" in attributes
    name = key.rpartition("/")[2]
    if not isinstance(stack, str) or (stack and not name.startswith(f"{stack}.")):
        return f"the stack {_short_repr(stack)} is not the beginning of its name"
    if stacked and not dims:
        return "it has no dim that counts the layers of its stack"
    if "tp_dim" in attributes and not (type(tp_dim) is int and stacked <= tp_dim < dims):
        return f"tp_dim is {_short_repr(tp_dim)}, of {dims} dims{' of which the first counts layers' * stacked}"
    if "axis" in attributes and not ("tp_dim" in attributes and attributes["axis"] == "ep"):
        return f"the axis {_short_repr(attributes['axis'])} cuts no dim of it"
    if "layers" in attributes or "depth" in attributes:
        return _impossible_layers(
            shape[0] if stacked else 0, attributes.get("layers"), attributes.get("depth")
        )
    return None


def _impossible_layers(rows: int, layers: Any, depth: Any) -> str | None:
    """Why an array of so many rows cannot be of these layers of a model with `depth` of them; None if it can."""
    sound = type(depth) is int and isinstance(layers, list) and len(layers) == rows < depth
    if not sound or any(type(number) is not int for number in layers):
        return f"{rows} rows cannot be of the layers {_short_repr(layers)} of {_short_repr(depth)}"
    if layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < depth:
        return f"its layers {_short_repr(layers)} are not ascending numbers below {depth}"
    return None


def _short_repr(value: Any) -> str:
    text = repr(value)
    if len(text) <= 120:
        return text
    return text[:120] + "…"
