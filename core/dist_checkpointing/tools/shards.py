"""Files of the safetensors format, written while the checkpoint is read: the library would want whole files in
memory. 8 bytes with the length of a JSON header, the header, then the values of each tensor, little endian."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from uuid import uuid4

import ml_dtypes  # tensorstore needs it
import numpy as np

from core.dist_checkpointing.format.arrays import STORED_DTYPES, ArrayInfo
from core.dist_checkpointing.format.grid import blocks
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.storage.address import root_and_name
from core.dist_checkpointing.tools.stream import stream
from core.parallel_state.flat import Box

SHARD = 2 << 30  # bytes of a file, unless one tensor is larger
NAMES = {
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
class Tensor:
    """name, shape, dtype: in the file. key, box: of which stored array which part it is."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    key: str
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return prod(self.shape) * ArrayInfo((), self.dtype).itemsize


def write(
    stored: StoredCheckpoint,
    tensors: Sequence[Tensor],
    folder: Path,
    done: Callable[[int], None],
    shard_bytes: int = SHARD,
) -> None:
    """`model-00001-of-0000N.safetensors` and Hugging Face's `model.safetensors.index.json` in a folder."""
    if unnamed := [t for t in tensors if t.dtype not in NAMES]:
        first = unnamed[0]
        raise ValueError(f"{first.name} is {first.dtype}, which safetensors has no name for; read it with zarr")
    groups = _groups(tensors, shard_bytes)
    values = stream(stored, ((t.key, block) for group in groups for t in group for block in blocks(t.box)))
    where: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        where |= {t.name: name for t in group}
        with open(folder / name, "wb") as file:
            file.write(_header(group))
            for t in group:
                for _ in blocks(t.box):
                    array = _converted(next(values), stored.dtype(t.key), t.dtype)
                    file.write(array.data)
                    done(array.nbytes)
            file.flush()
            os.fsync(file.fileno())
    for _ in values:  # its end: every file read was the right one
        raise AssertionError("more was read than written")
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _groups(tensors: Sequence[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """The tensors of each file; wide types first, for the start of each value is a multiple of its size then."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return [sorted(group, key=lambda t: -ArrayInfo((), t.dtype).itemsize) for group in groups]


def _header(group: Sequence[Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in group:
        entries[t.name] = {"dtype": NAMES[t.dtype], "shape": t.shape, "data_offsets": (offset, offset + t.nbytes)}
        offset += t.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _converted(array: np.ndarray, stored: str, wanted: str) -> np.ndarray:
    """Values of another dtype, rounded to the nearest, as bits."""
    if stored == wanted:
        return array
    with np.errstate(invalid="ignore", over="ignore"):  # NaN stays NaN, what is too large becomes infinite
        return array.view(_numpy(stored)).astype(_numpy(wanted)).view(STORED_DTYPES[wanted][0])


def _numpy(dtype: str) -> np.dtype:
    return np.dtype(STORED_DTYPES[dtype][0] if STORED_DTYPES[dtype][0] == dtype else getattr(ml_dtypes, dtype))


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A directory to fill, made beside `path`, which it becomes at the end: it is there as a whole or not at all.

    Raises ValueError: something is there already; a URL.
    """
    if "://" in os.fspath(path):
        raise ValueError(f"{path}: these files are written into a local directory only; copy them from there")
    folder, name = root_and_name(path)
    final, root, uuid = Path(folder, name), CheckpointRoot(folder), uuid4().hex
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ValueError(f"{final} is there already; give a directory that is to be made")
    root.sweep()
    temporary = root.begin(name, uuid)
    try:
        with root.beating(name, uuid):
            yield Path(temporary.url)
        root.publish_folder(name, uuid)
    except BaseException:
        root.abandon(name, uuid)
        raise
