"""What one `torch.save` holds, without its tensors' values: these are known by where they lie in the file.

The pickle in the archive calls nothing (`inert`), whatever classes it names. Values are then read piece by piece.
"""

import io
import pickle
import zipfile
from dataclasses import dataclass
from math import prod
from typing import Any

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.storage.fs import open_regular
from core.dist_checkpointing.tools.foreign.dcp import ByteRange
from core.dist_checkpointing.tools.foreign.dcp_shards import check_archive
from core.dist_checkpointing.tools.foreign.inert import InertUnpickler, size_of

MAX_PICKLE_BYTES = 256 << 20  # names and shapes, not values
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True)
class ArchivedTensor:
    """A tensor that lies in C order from byte `start` of a file on; storage: equal where tensors share memory."""

    file: str
    start: int
    shape: tuple[int, ...]
    dtype: str
    storage: tuple[str, int]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    def interval(self, first: int, stop: int) -> ByteRange:
        """Elements [first, stop) of its flat form. Raises ValueError: it has fewer."""
        if not 0 <= first <= stop <= self.numel:
            raise ValueError(f"{self.file}: elements {first} to {stop} of a tensor of {self.numel}")
        size = ArrayInfo((), self.dtype).itemsize
        return ByteRange(
            self.file, self.start + first * size, (stop - first) * size, raw=self.dtype
        )


class Names(dict):
    """In the place of `OrderedDict`: what else the pickle says of it is left out."""

    state: Any = None


@dataclass(frozen=True)
class _Storage:
    entry: str
    numel: int
    dtype: str


def read_archive(path: str) -> Any:
    """The value: dicts, lists, numbers, texts, `ArchivedTensor`s, and `Record`s of everything else.

    The whole file is read once, for its checksums. Raises ValueError: damage, a tensor that lies otherwise than in
    C order inside of its file. FileNotFoundError.
    """
    try:
        with open(open_regular(path), "rb") as file:
            check_archive(file, file.seek(0, io.SEEK_END))
            with zipfile.ZipFile(file) as archive:
                entries = {entry.filename: entry for entry in archive.infolist()}
                (root,) = (
                    name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl")
                )
                pickled = entries[f"{root}data.pkl"]
                if pickled.file_size > MAX_PICKLE_BYTES:
                    raise ValueError(
                        f"its pickle has {pickled.file_size} bytes, at most {MAX_PICKLE_BYTES} are read"
                    )
                order = f"{root}byteorder"
                if order in entries and archive.read(order) != b"little":
                    raise ValueError("its values are not little endian")
                starts = {
                    name.removeprefix(f"{root}data/"): (_start_of(file, entry), entry.file_size)
                    for name, entry in entries.items()
                }
                data = io.BytesIO(archive.read(pickled))
            return _ArchiveUnpickler(data, path, starts).load()
    except OSError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise ValueError(f"{path}: {error}: not as torch.save writes it, or damaged") from None


def _start_of(file: io.BufferedReader, entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin: behind its own header, whose names have lengths of their own."""
    file.seek(entry.header_offset)
    header = file.read(30)
    return (
        entry.header_offset
        + 30
        + int.from_bytes(header[26:28], "little")
        + int.from_bytes(header[28:30], "little")
    )


class _ArchiveUnpickler(InertUnpickler):
    def __init__(self, data: io.BytesIO, path: str, starts: dict[str, tuple[int, int]]) -> None:
        super().__init__(data)
        self._path = path
        self._starts = starts

    def find_class(self, module: str, name: str) -> Any:
        """torch's words for tensors are functions of this class, every other class is a record."""
        if (module, name) == ("collections", "OrderedDict"):
            return Names
        if module == "torch" and name == "Size":
            return size_of
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _first
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _same_tensor
        return self.record_of(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        """("storage", type, number, device, elements)."""
        kind, dtype, number, _, numel = pid
        if kind != "storage" or not isinstance(dtype, str) or type(numel) is not int:
            raise pickle.UnpicklingError(f"a storage that torch does not write: {pid!r}")
        return _Storage(str(number), numel, dtype)

    def _tensor(
        self, storage: Any, offset: Any, size: Any, stride: Any, *unused: Any
    ) -> ArchivedTensor:
        if not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("a tensor without a storage")
        shape, strides = size_of(size), size_of(stride)
        numbers = (offset, storage.numel, *shape, *strides)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise pickle.UnpicklingError(f"a tensor of {shape} at {offset}")
        itemsize = ArrayInfo((), storage.dtype).itemsize
        start, nbytes = self._starts[storage.entry]
        if storage.numel * itemsize > nbytes or offset + prod(shape) > storage.numel:
            raise pickle.UnpicklingError(
                f"a tensor of {shape} at {offset} does not lie in {nbytes} bytes"
            )
        if prod(shape) and not _in_c_order(shape, strides):
            raise pickle.UnpicklingError(f"a tensor of {shape} has strides {strides}")
        first = start + offset * itemsize
        return ArchivedTensor(self._path, first, shape, storage.dtype, (storage.entry, offset))

    def build(self) -> None:
        """As a record's: of an OrderedDict, too (a state dict's `_metadata`)."""
        if isinstance(self.stack[-2], Names | ArchivedTensor):
            self.stack.pop()
            return
        super().build()

    dispatch = {**InertUnpickler.dispatch, pickle.BUILD[0]: build}  # noqa: RUF012  (as pickle has it)


def _in_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _first(value: Any, *unused: Any) -> Any:
    """A parameter is its tensor."""
    return value


def _same_tensor(rebuild: Any, kind: Any, arguments: Any, state: Any) -> ArchivedTensor:
    """A tensor with attributes is that tensor."""
    tensor = rebuild(*arguments) if getattr(rebuild, "__name__", "") == "_tensor" else None
    if not isinstance(tensor, ArchivedTensor):
        raise pickle.UnpicklingError("a tensor of a class of its own")
    return tensor
