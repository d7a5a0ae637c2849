"""What a directory of torch's DCP (torch.distributed.checkpoint) holds; Megatron's `torch_dist` is one, too.

`.metadata` is a pickle, which could run any code. Here it calls nothing: the few classes that DCP writes are records
without behaviour, every other name is refused, and memory grows with the file only. No torch.
"""

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from core.dist_checkpointing.format.json_files import parse_json
from core.dist_checkpointing.publish.manifest import leads_elsewhere
from core.dist_checkpointing.storage.fs import open_regular
from core.dist_checkpointing.tools.foreign.inert import InertUnpickler, Record, size_of
from core.parallel_state.flat import Box, volume

METADATA = ".metadata"
COMMON = "common.pt"  # of Megatron: what is no tensor
MEGATRON = "metadata.json"
# of `.metadata`: two million shards
MAX_METADATA_BYTES = 256 << 20

_DCP = "torch.distributed.checkpoint."
_MODULES = {
    _DCP + "metadata",
    _DCP + "filesystem",
    _DCP + "planner",
    "torch.distributed._shard.sharded_tensor.metadata",
}


@dataclass(frozen=True)
class ByteRange:
    """Where the output of one `torch.save` lies: bytes of a file.

    within: names and positions that lead to the value inside of what it loads. raw: they are the plain values of a
    tensor of that dtype, in C order, and no output of `torch.save`. shape: of the tensor there, where its box has
    other dims for the same elements in C order.
    """

    file: str
    offset: int
    length: int
    within: tuple[str, ...] = ()
    raw: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SavedTensor:
    """dtype: torch's name. shards: its boxes, and where each lies."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[tuple[Box, ByteRange], ...]


@dataclass(frozen=True)
class DcpContents:
    """All entries of a directory.

    tensors, values: by key, the names of nested dicts joined by `/` where DCP flattened them. paths: key -> those
    names, and positions in lists, as integers.
    """

    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, ByteRange]
    paths: Mapping[str, tuple[str | int, ...]]
    version: str


# by name and offset; None: of a value
ByteRanges = dict[tuple[str, tuple[int, ...] | None], ByteRange]


def _member(kind: Any, name: Any) -> Record:
    """In the place of `getattr`, by which Python 3.11.0 to 3.11.3 write the members of an enumeration."""
    if not (isinstance(kind, type) and issubclass(kind, Record) and isinstance(name, str)):
        raise pickle.UnpicklingError("it names builtins.getattr of what is no enumeration of DCP's")
    return kind(name)


class _DcpUnpickler(InertUnpickler):
    """Knows DCP's classes as records, `torch.Size` as a tuple, dtypes as their names."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError: a name that DCP does not write."""
        harmless = module.partition(".")[0] == "pathlib" or (module, name) == (
            "torch.serialization",
            "_get_layout",
        )
        if module in _MODULES or harmless:
            return self.record_of(name)
        if module == "torch":
            if name == "Size":
                return size_of
            return name
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is no part of DCP's metadata"
        )


def read_dcp(folder: str) -> DcpContents:
    """Raises ValueError: what DCP does not write, with the file. FileNotFoundError: no such directory."""
    _check_folder(folder)
    path = os.path.join(folder, METADATA)
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_METADATA_BYTES:
                raise ValueError(f"it has {size} bytes, at most {MAX_METADATA_BYTES} are read")
            # from memory: no opcode can ask for more bytes than there are
            data = io.BytesIO(file.read())
        return _contents(folder, _DcpUnpickler(data).load())
    except OSError:
        raise
    except Exception as error:
        # a damaged pickle may raise anything
        raise ValueError(
            f"{path}: {error}: not as torch's DCP writes it; restore it from a copy"
        ) from None


def _check_folder(folder: str) -> None:
    names = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    if MEGATRON in names:
        backend = _megatron_backend(os.path.join(folder, MEGATRON))
        if backend not in ("torch_dist", None):
            raise ValueError(
                f"{folder} is Megatron's {backend!r}; only torch_dist is read: save it so with Megatron"
            )
    if METADATA in names:
        return
    steps = sorted(name for name in names if os.path.exists(os.path.join(folder, name, METADATA)))
    if steps:
        raise ValueError(
            f"{folder} has no {METADATA}, but {len(steps)} directories in it have: give {steps[-1]}"
        )
    raise FileNotFoundError(
        f"{folder} is no directory of torch's DCP, it has no {METADATA} (a save that is not finished has none either)"
    )


def _megatron_backend(path: str) -> Any:
    """The format of a directory, by Megatron's metadata.json; None: the file is another program's."""
    try:
        with open(open_regular(path), "rb") as file:
            value = parse_json(file.read(1 << 20), path)
    except ValueError:
        return None
    if isinstance(value, dict):
        return value.get("sharded_backend")
    return None


def _contents(folder: str, metadata: Any) -> DcpContents:
    fields = _fields(metadata, "Metadata")
    byte_ranges: ByteRanges = {}
    for index, info in fields["storage_data"].items():
        index_fields = _fields(index, "MetadataIndex")
        name = index_fields["fqn"]
        byte_ranges[name, index_fields.get("offset")] = _byte_range(
            folder, name, _fields(info, "_StorageInfo")
        )
    # DCP flattens nested dicts and lists, and keeps the way to each value
    # name -> where it was in nested dicts
    flattened: Mapping[str, Any] = fields.get("planner_data") or {}
    tensors: dict[str, SavedTensor] = {}
    values: dict[str, ByteRange] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, entry in fields["state_dict_metadata"].items():
        path = tuple(flattened.get(name, (name,)))
        key = "/".join(map(str, path))
        if key in paths:
            raise ValueError(f"two entries would be called {key}")
        paths[key] = path
        if type(entry).__name__ == "BytesStorageMetadata":
            values[key] = _look_up(byte_ranges, name, None)
        else:
            tensors[key] = _tensor(name, _fields(entry, "TensorStorageMetadata"), byte_ranges)
    return DcpContents(tensors, values, paths, str(fields.get("version")))


def _fields(record: Any, kind: str) -> dict[str, Any]:
    """The attributes of a record. ValueError: it is of another class."""
    if not isinstance(record, Record) or type(record).__name__ != kind:
        raise ValueError(f"{type(record).__name__} stands where {kind} should")
    return dict(record.state)


def _byte_range(folder: str, name: str, fields: Mapping[str, Any]) -> ByteRange:
    path = fields["relative_path"]
    offset = fields["offset"]
    length = fields["length"]
    # a path of the file is not believed: it could name any file of this machine
    if leads_elsewhere(path):
        raise ValueError(f"{name} lies outside, in {path!r}")
    if fields.get("transform_descriptors"):
        raise ValueError(
            f"{name} is written through {fields['transform_descriptors']}; save it without extensions"
        )
    if not all(type(number) is int and number >= 0 for number in (offset, length)):
        raise ValueError(f"{name} lies at {offset!r}, {length!r}")
    return ByteRange(os.path.join(folder, path), offset, length)


def _look_up(byte_ranges: ByteRanges, name: str, offset: tuple[int, ...] | None) -> ByteRange:
    if (name, offset) not in byte_ranges:
        raise ValueError(f"{name}: where its piece at {offset} lies is not said")
    return byte_ranges[name, offset]


def _tensor(name: str, fields: Mapping[str, Any], byte_ranges: ByteRanges) -> SavedTensor:
    """Raises ValueError: shards that leave the tensor, or do not have as many elements as it."""
    dtype = fields["properties"].state[0]
    shape = tuple(fields["size"])
    shards = []
    for chunk in fields["chunks"]:
        chunk_fields = _fields(chunk, "ChunkStorageMetadata")
        offset = tuple(chunk_fields["offsets"])
        sizes = tuple(chunk_fields["sizes"])
        box = tuple((start, start + size) for start, size in zip(offset, sizes, strict=True))
        are_sizes = all(type(number) is int and number >= 0 for number in (*shape, *offset, *sizes))
        if not are_sizes or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
            raise ValueError(f"{name}: a piece {box} does not lie in {shape}")
        if volume(box):
            shards.append((box, _look_up(byte_ranges, name, offset)))
    # overlaps are found when the shards are read; here their number must be right
    elements = sum(volume(box) for box, _ in shards)
    if elements != prod(shape):
        raise ValueError(
            f"{name}: its pieces have {elements} elements, its shape {shape} has {prod(shape)}"
        )
    return SavedTensor(shape, str(dtype), tuple(shards))
