"""The values of a directory of torch's DCP, one `torch.save` at a time, by `torch.load(weights_only=True)`."""

import io
import os
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from core.dist_checkpointing.state.tensors import unstorable
from core.dist_checkpointing.storage.fs import open_regular
from core.dist_checkpointing.tools.dcp import SavedTensor, Stretch
from core.parallel_state.flat import Box, extent, intersect, relative, slices

KEPT = 1 << 30  # bytes of pieces that are kept for the next cells: a piece may be a part of many


def load_stretch(where: Stretch) -> Any:
    """What `torch.save` wrote there. Raises ValueError: damage, or a type that weights_only=True does not read."""
    try:
        with _opened(where) as file:
            _check_archive(file, where.length)
            file.seek(0)
            found = torch.load(file, map_location="cpu", weights_only=True)
            for name in where.within:
                found = _item(found, name)
            return found
    except OSError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        lines = [line.strip() for line in str(error).splitlines()]
        why = next((line for line in lines if "nsupported" in line), "".join(lines[:1]))
        raise ValueError(f"bytes {where.offset} to {where.offset + where.length} of {where.file}: {why}") from None


@contextmanager
def _opened(where: Stretch) -> Iterator[io.BufferedReader]:
    descriptor = open_regular(where.file)
    with open(descriptor, "rb", buffering=0) as file:
        if (size := os.fstat(descriptor).st_size) < where.offset + where.length:
            raise ValueError(f"the file ends at {size}")
        yield io.BufferedReader(_Window(file, where.offset, where.length))


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, into: Any) -> int:
        n = max(0, min(len(into), self._length - self._at))
        self._file.seek(self._start + self._at)
        found = self._file.readinto(memoryview(into)[:n]) or 0
        self._at += found
        return found


def _check_archive(file: io.BufferedReader, length: int) -> None:
    """Raises ValueError: no archive of torch.save, one that would be larger in memory than it is here, damage, which
    torch does not look for."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed, which torch.save does not do")
        if (size := sum(entry.file_size for entry in entries)) > length:
            raise ValueError(f"it says to hold {size} bytes")
        if (bad := archive.testzip()) is not None:
            raise ValueError(
                f"{bad} is damaged by its CRC-32 (or set_crc32_options(False) was set when it was saved)"
            )


def _item(value: Any, name: str) -> Any:
    if isinstance(value, (list, tuple)):
        return value[int(name)]
    return next(item for key, item in value.items() if str(key) == name)


class Pieces:
    """Loads pieces of tensors; the last ones are kept, up to `KEPT` bytes beside the one in use."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Stretch, Tensor] = OrderedDict()

    def fill(self, key: str, tensor: SavedTensor, box: Box) -> Tensor:
        """The values of a box, in new memory. Raises ValueError: damage, or an element that no piece holds."""
        whole = torch.empty(extent(box), dtype=getattr(torch, tensor.dtype))
        seen = torch.zeros(extent(box), dtype=torch.bool)
        for held, where in tensor.pieces:
            if (both := intersect(held, box)) is not None:
                at = slices(relative(both, box))
                if bool(seen[at].any()):
                    raise ValueError(f"{key}: two pieces hold {both}; the directory is damaged")
                seen[at] = True
                whole[at] = self._piece(key, tensor, held, where)[slices(relative(both, held))]
        if not bool(seen.all()):
            raise ValueError(f"{key}: no piece holds a part of {box}; the directory is damaged")
        return whole

    def _piece(self, key: str, tensor: SavedTensor, box: Box, where: Stretch) -> Tensor:
        if where in self._kept:
            self._kept.move_to_end(where)
            return self._kept[where]
        while self._kept and sum(t.untyped_storage().nbytes() for t in self._kept.values()) > KEPT - where.length:
            self._kept.popitem(last=False)
        found = load_stretch(where)
        is_one = isinstance(found, Tensor) and not unstorable(found)
        if not is_one or str(found.dtype) != f"torch.{tensor.dtype}" or tuple(found.shape) != extent(box):
            told = f"{found.dtype} of {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{key}: {where.file} holds {told} where {tensor.dtype} of {extent(box)} should be")
        self._kept[where] = found
        return found
