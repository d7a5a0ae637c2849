"""Files of the safetensors format, written while the checkpoint is read: the library would want full files in memory.

A file is 8 bytes with the length of a JSON header, the header, then the values of each tensor, little endian.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import ml_dtypes  # tensorstore needs it
import numpy as np

from core.dist_checkpointing.format.arrays import STORED_DTYPES, ArrayInfo
from core.dist_checkpointing.format.grid import blocks
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.reading.stream import stream
from core.dist_checkpointing.storage.address import root_and_name
from core.parallel_state.flat import Box

FILE_BYTES = 2 << 30  # of a file, unless one tensor is larger
DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "complex64": "C64",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class FileTensor:
    """name, shape, dtype (torch's name): of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element in the file."""
        return ArrayInfo((), self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class ExportedTensor(FileTensor):
    """key, box: the stored array, and the box of it, that the tensor is read from."""

    key: str
    box: Box


T = TypeVar("T", bound=FileTensor)


def write(
    stored: StoredCheckpoint,
    tensors: Sequence[ExportedTensor],
    folder: Path,
    done: Callable[[int], None],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Stored arrays as they are, or of another dtype, in files of a folder; see `write_files`."""
    files = tensors_by_file(tensors, file_bytes)
    # what is read ahead comes back in this order, which is that of writing
    requests = (
        (tensor.key, block) for file in files for tensor in file for block in blocks(tensor.box)
    )
    values = stream(stored, requests)

    def converted(tensor: ExportedTensor) -> Iterator[np.ndarray]:
        for _ in blocks(tensor.box):
            yield _converted(next(values), stored.dtype(tensor.key), tensor.dtype)

    write_files(folder, files, converted, done)
    # the stream's end is where it raises if a file that was read is not the one that was saved
    for _ in values:
        raise AssertionError("more was read than written")


def write_files(
    folder: Path,
    files: Sequence[Sequence[T]],
    values_of: Callable[[T], Iterable[np.ndarray]],
    done: Callable[[int], None],
) -> None:
    """`model-00001-of-0000N.safetensors` and Hugging Face's `model.safetensors.index.json` in a folder.

    values_of(tensor) -> its values in C order, in arrays that follow each other; asked for in the order of `files`.
    """
    tensors = list(chain.from_iterable(files))
    _refuse_unnamed(tensors)
    file_of_tensor: dict[str, str] = {}
    for number, file_tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_file(folder / name, file_tensors, values_of, done)
        file_of_tensor |= dict.fromkeys((tensor.name for tensor in file_tensors), name)
    total_size = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total_size}, "weight_map": file_of_tensor}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2, sort_keys=True) + "\n"
    )


def write_file(
    path: Path,
    tensors: Sequence[T],
    values_of: Callable[[T], Iterable[np.ndarray]],
    done: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """One file of the tensors, which `tensors_by_file` has put in order; on the disk when this returns."""
    _refuse_unnamed(tensors)
    with open(path, "wb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            for array in values_of(tensor):
                file.write(array.data)
                done(array.nbytes)
                del array  # before the next one is read
        file.flush()
        os.fsync(file.fileno())


def _refuse_unnamed(tensors: Iterable[FileTensor]) -> None:
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{tensor.name} is {tensor.dtype}, which safetensors has no name for; read it with zarr"
            )


def tensors_by_file(tensors: Sequence[T], file_bytes: int) -> list[list[T]]:
    """The tensors of each file; wide types first, so that the start of each tensor is a multiple of its item size."""
    files: list[list[T]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return [sorted(file, key=lambda tensor: -tensor.itemsize) for file in files]


def _header(tensors: Sequence[FileTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        entries[tensor.name] = {
            "dtype": dtype,
            "shape": tensor.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # the values begin at a multiple of 8
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _converted(array: np.ndarray, stored_dtype: str, dtype: str) -> np.ndarray:
    """Values of another dtype, rounded to the nearest, as bits."""
    if stored_dtype == dtype:
        return array
    # NaN stays NaN, what is too large becomes infinite
    with np.errstate(invalid="ignore", over="ignore"):
        converted = array.view(_numpy_dtype(stored_dtype)).astype(_numpy_dtype(dtype))
    return converted.view(STORED_DTYPES[dtype][0])


def _numpy_dtype(dtype: str) -> np.dtype:
    stored_dtype, _ = STORED_DTYPES[dtype]
    return np.dtype(stored_dtype if stored_dtype == dtype else getattr(ml_dtypes, dtype))


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A directory to fill, made beside `path`, which it becomes at the end: it is there as a whole or not at all.

    Raises ValueError: something is there already; a URL.
    """
    if "://" in os.fspath(path):
        raise ValueError(
            f"{path}: these files are written into a local directory only; copy them from there"
        )
    folder, name = root_and_name(path)
    final = Path(folder, name)
    root = CheckpointRoot(folder)
    uuid = uuid4().hex
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ValueError(f"{final} is there already; give a directory that is to be made")
    # what an export left that was killed
    root.sweep()
    temporary = root.begin(name, uuid)
    try:
        # others sweep what shows no sign of life
        with root.beating(name, uuid):
            yield Path(temporary.url)
        root.publish_folder(name, uuid)
    except BaseException:
        root.abandon(name, uuid)
        raise
