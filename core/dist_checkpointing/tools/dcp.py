"""What a directory of torch's DCP (torch.distributed.checkpoint) says it holds; Megatron's `torch_dist` is one, too.

`.metadata` is a pickle, which could run any code. Here it calls nothing: the few classes that DCP writes are records
without behaviour, every other name is refused, and memory grows with the file only. No torch.
"""

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from core.dist_checkpointing.format.json_files import parse_json
from core.dist_checkpointing.publish.manifest import leads_elsewhere
from core.dist_checkpointing.storage.fs import open_regular
from core.parallel_state.flat import Box, volume

METADATA = ".metadata"
COMMON = "common.pt"  # of Megatron: what is no tensor
MEGATRON = "metadata.json"
MAX_METADATA_BYTES = 256 << 20  # of `.metadata`: two million pieces
MOST_ARGUMENTS = 64

_DCP = "torch.distributed.checkpoint."
_MODULES = {
    _DCP + "metadata",
    _DCP + "filesystem",
    _DCP + "planner",
    "torch.distributed._shard.sharded_tensor.metadata",
}


@dataclass(frozen=True)
class Stretch:
    """Where one `torch.save` lies: bytes of a file. within: names and positions inside of what it gives."""

    file: str
    offset: int
    length: int
    within: tuple[str, ...] = ()


@dataclass(frozen=True)
class SavedTensor:
    """dtype: torch's name. pieces: its boxes, and where each lies."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[Box, Stretch], ...]


@dataclass(frozen=True)
class Saved:
    """tensors, values: by key, the names of nested dicts joined by `/` where DCP flattened them. paths: key -> those
    names, and positions in lists, as integers."""

    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, Stretch]
    paths: Mapping[str, tuple[str | int, ...]]
    version: str


Places = dict[tuple[str, tuple[int, ...] | None], Stretch]  # by name and offset; None: of a value


class _Record:
    """What the pickle says of an object, and nothing that it could do."""

    state: Any

    def __init__(self, *arguments: Any) -> None:
        if len(arguments) > MOST_ARGUMENTS:  # the same ones may be given again and again
            raise pickle.UnpicklingError(f"{len(arguments)} arguments, which no class of DCP has")


def _size(dims: Any = ()) -> tuple[Any, ...]:
    """In the place of `torch.Size`."""
    if len(dims) > MOST_ARGUMENTS:
        raise pickle.UnpicklingError(f"a tensor of {len(dims)} dims")
    return tuple(dims)


class _Unpickler(pickle._Unpickler):
    """Knows DCP's classes as records, `torch.Size` as a tuple, dtypes as their names. Written in Python: the one in
    C allocates whatever a few bytes ask for."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)  # opcode -> what it does

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError: a name that DCP does not write."""
        inert = module.partition(".")[0] == "pathlib" or (module, name) == ("torch.serialization", "_get_layout")
        if module in _MODULES or inert:
            return self._classes.setdefault(name, type(name, (_Record,), {}))
        if module == "torch":
            return _size if name == "Size" else name
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of DCP's metadata")

    def build(self) -> None:
        """What an object is told of itself."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Record):
            raise pickle.UnpicklingError(f"it changes a {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    dispatch[pickle.BUILD[0]] = build
    for _unused in (pickle.BYTEARRAY8, pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        del dispatch[_unused[0]]


def read_saved(folder: str) -> Saved:
    """Raises ValueError: what DCP does not write, with the file. FileNotFoundError: no such directory."""
    _check_folder(folder)
    path = os.path.join(folder, METADATA)
    try:
        with open(open_regular(path), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_METADATA_BYTES:
                raise ValueError(f"it has {size} bytes, at most {MAX_METADATA_BYTES} are read")
            data = io.BytesIO(file.read())  # which reads no more than it has, however much is asked for
        return _contents(folder, _Unpickler(data).load())
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{path}: {error}: not as torch's DCP writes it; restore it from a copy") from None


def _check_folder(folder: str) -> None:
    names = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    if MEGATRON in names and (backend := _backend(os.path.join(folder, MEGATRON))) not in ("torch_dist", None):
        raise ValueError(f"{folder} is Megatron's {backend!r}; only torch_dist is read: save it so with Megatron")
    if METADATA in names:
        return
    if steps := sorted(name for name in names if os.path.exists(os.path.join(folder, name, METADATA))):
        raise ValueError(f"{folder} has no {METADATA}, but {len(steps)} directories in it have: give {steps[-1]}")
    raise FileNotFoundError(
        f"{folder} is no directory of torch's DCP, it has no {METADATA} (a save that is not finished has none either)"
    )


def _backend(path: str) -> Any:
    """What Megatron says of a directory's format; None: the file is another program's."""
    try:
        with open(open_regular(path), "rb") as file:
            told = parse_json(file.read(1 << 20), path)
    except ValueError:
        return None
    return told.get("sharded_backend") if isinstance(told, dict) else None


def _contents(folder: str, metadata: Any) -> Saved:
    facts = _facts(metadata, "Metadata")
    where: Places = {}
    for index, told in facts["storage_data"].items():
        known = _facts(index, "MetadataIndex")
        where[known["fqn"], known.get("offset")] = _stretch(folder, known["fqn"], _facts(told, "_StorageInfo"))
    nested: Mapping[str, Any] = facts.get("planner_data") or {}
    tensors: dict[str, SavedTensor] = {}
    values: dict[str, Stretch] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, told in facts["state_dict_metadata"].items():
        path = tuple(nested.get(name, (name,)))
        if (key := "/".join(map(str, path))) in paths:
            raise ValueError(f"two entries would be called {key}")
        paths[key] = path
        if type(told).__name__ == "BytesStorageMetadata":
            values[key] = _place(where, name, None)
        else:
            tensors[key] = _tensor(name, _facts(told, "TensorStorageMetadata"), where)
    return Saved(tensors, values, paths, str(facts.get("version")))


def _facts(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise ValueError(f"{type(record).__name__} stands where {kind} should")
    return dict(record.state)


def _stretch(folder: str, name: str, told: Mapping[str, Any]) -> Stretch:
    path, offset, length = told["relative_path"], told["offset"], told["length"]
    if leads_elsewhere(path):
        raise ValueError(f"{name} lies outside, in {path!r}")
    if told.get("transform_descriptors"):
        raise ValueError(f"{name} is written through {told['transform_descriptors']}; save it without extensions")
    if not all(type(n) is int and n >= 0 for n in (offset, length)):
        raise ValueError(f"{name} lies at {offset!r}, {length!r}")
    return Stretch(os.path.join(folder, path), offset, length)


def _place(where: Places, name: str, offset: tuple[int, ...] | None) -> Stretch:
    if (name, offset) not in where:
        raise ValueError(f"{name}: where its piece at {offset} lies is not said")
    return where[name, offset]


def _tensor(name: str, told: Mapping[str, Any], where: Places) -> SavedTensor:
    dtype = told["properties"].state[0]
    shape, pieces = tuple(told["size"]), []
    for chunk in told["chunks"]:
        facts = _facts(chunk, "ChunkStorageMetadata")
        start, size = tuple(facts["offsets"]), tuple(facts["sizes"])
        box = tuple((a, a + n) for a, n in zip(start, size, strict=True))
        numbers = all(type(n) is int and n >= 0 for n in (*shape, *start, *size))
        if not numbers or any(b > n for (_, b), n in zip(box, shape, strict=True)):
            raise ValueError(f"{name}: a piece {box} does not lie in {shape}")
        if volume(box):
            pieces.append((box, _place(where, name, start)))
    if (held := sum(volume(box) for box, _ in pieces)) != prod(shape):
        raise ValueError(f"{name}: its pieces have {held} elements, its shape {shape} has {prod(shape)}")
    return SavedTensor(shape, str(dtype), tuple(pieces))
